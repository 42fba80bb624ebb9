"""Auxiliary losses for training deep character models."""

import typing

import keras
from keras import ops

from keras_efficient_attn.layers import ChunkedVocabularyLoss
from keras_efficient_attn.layers.arguments import add_counter
from keras_efficient_attn.models.blocks.residual import get_norm
from keras_efficient_attn.models.tasks.task import TaskWrapper
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_positive_int,
    check_weight,
)
from keras_efficient_attn.ops.common.documents import document_numbers


class Targets(typing.NamedTuple):
    """What the layers predict.

    Attributes:
        tokens: Integers `(batch, length)`: the next token of each position.
        weight: `(batch, length)`, the `sample_weight`; or `None`.
        document: Integers `(batch, length)`: the number of each position's document in
            its row; `None` for one document in each row.
    """

    tokens: object
    weight: object
    document: object


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class AuxiliaryLosses(TaskWrapper):
    """Trains a causal language model with additional losses of its lower layers.

    ```
    loss = L[n] + Σ_{l<n} [step < total_steps · l / 2n] · L[l]
    L[l] = CE[l, 1] + target_weight · (CE[l, 2] + … + CE[l, num_targets])
    ```

    `CE[l, k]` is the mean cross-entropy, over all positions, of layer `l` of `n`
    predicting the `k`-th token after a position through its own output projection.
    `CE[n, 1]` is the loss that this model is compiled with, on the model's own logits.
    The layers' losses stop in order, the lowest first; all except the last stop in the
    first half of training. Positions without a `k`-th token in the targets are ignored,
    as at the end of a row and, with `document_ids`, of a document. So are targets of
    the `ignore_class` of the compiled loss. `sample_weight`, `(batch, length)` or
    `(batch, 1)`, counts as in Keras' losses.

    The additional projections are used in training only: `evaluate` and `predict` use
    `model`, whose weights are trained in place. A loss that has stopped still costs its
    projection.

    Args:
        model: The model to train: an `EfficientCausalLM`, with any attention.
        total_steps: Positive integer: number of training steps of the schedule. A saved
            weight counts the steps.
        num_targets: Positive integer: tokens to predict at each position. Defaults
            to 2.
        target_weight: Weight of the targets after the first. Defaults to 0.5.
        **kwargs: Arguments of `keras.Model`.

    Call arguments:
        inputs: As for `model`, with `document_ids` if its backbone takes documents.

    Returns:
        The logits of `model`; in training, a dict with these as `"logits"` and with
        `"layers"`, a list of `(batch, length, hidden_dim)`.

    Raises:
        ValueError: For an unsupported value of an argument above; from `fit` and
            `evaluate`, for a `sample_weight` of another shape; in training, for fewer
            positions than `num_targets`.

    Example:

    ```python
    model = EfficientCausalLM(backbone)
    training = AuxiliaryLosses(model, total_steps=10_000)
    training.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    training.fit(batches, steps_per_epoch=1_000, epochs=10)
    model.generate(...)
    ```

    Reference:
        - [Al-Rfou et al., 2019](https://arxiv.org/abs/1808.04444)
    """

    task_argument = "model"

    def __init__(
        self,
        model,
        total_steps,
        num_targets: int = 2,
        target_weight: float = 0.5,
        **kwargs,
    ):
        super().__init__(**kwargs)
        backbone = getattr(model, "backbone", None)
        if getattr(backbone, "architecture", None) != "decoder":
            raise ValueError(
                "`model` must be a causal language model on an "
                "EfficientTransformerBackbone, such as EfficientCausalLM. Received: "
                f"model={model!r}"
            )
        if not backbone.decoder.returns_layers:
            raise ValueError(
                "`model` must have a stack of separate layers: a "
                f"`UniversalTransformer` is not supported. Received: model={model!r}"
            )
        check_positive_int("total_steps", total_steps)
        check_positive_int("num_targets", num_targets)
        check_weight("target_weight", target_weight)
        self.model = model
        self.keep(locals(), omit=("model", "backbone"))
        self._training_step = add_counter(self, "training_step")
        stack = backbone.decoder
        blocks = stack.blocks * stack.num_recurrences
        self._num_layers = len(blocks)
        layers = range(1, self._num_layers + 1)
        # `None` after a block that ends with its own norm. The stack norms the last.
        self.norms = [
            self._make_norm(layer, block) if stack.needs_norm(block) else None
            for layer, block in enumerate(blocks[:-1], 1)
        ]
        self.heads = [
            self._make_head(layer, target)
            for layer in layers
            for target in range(1, num_targets + 1)
            if (layer, target) != (self._num_layers, 1)
        ]
        self.built = True

    def _make_norm(self, layer, block):
        backbone = self.model.backbone
        norm = get_norm(
            block.norm,
            block.norm_epsilon,
            block.use_bias,
            dtype=backbone.decoder.dtype_policy,
            name=f"norm_{layer}",
        )
        norm.build(backbone.output.shape)
        return norm

    def _make_head(self, layer, target):
        backbone = self.model.backbone
        head = ChunkedVocabularyLoss(
            backbone.vocabulary_size,
            dtype=backbone.decoder.dtype_policy,
            name=f"layer_{layer}_target_{target}",
        )
        head.build(backbone.output.shape)
        return head

    def stops(self):
        """The steps after which the layers' losses stop, except the last's; a tuple."""
        n = self._num_layers
        return tuple(-(-self.total_steps * layer // (2 * n)) for layer in range(1, n))

    def call(self, inputs, training=None):
        if not training:
            return self.model(inputs, training=training)
        backbone = self.model.backbone
        rows = {
            "padding_mask": inputs["padding_mask"],
            "document_ids": self._document_ids(inputs),
        }
        x = backbone.embedding(inputs["token_ids"], **rows, training=training)
        x, layers = backbone.decoder(x, **rows, return_layers=True, training=training)
        logits = backbone.token_embedding(x, reverse=True)
        return {"logits": logits, "layers": [*layers[:-1], x]}

    def _document_ids(self, inputs):
        """The `document_ids`, or `None`: a model that takes none ignores them."""
        if "document_ids" not in self.model.backbone.input:
            return None
        return inputs.get("document_ids")

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if sample_weight is not None and len(sample_weight.shape) != 2:
            raise ValueError(
                "`sample_weight` must be (batch, length), or (batch, 1): pass weights "
                "of rows as `weights[:, None]`. Received: "
                f"sample_weight.shape={tuple(sample_weight.shape)}"
            )
        if not isinstance(y_pred, dict):
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        if isinstance(y.shape[1], int) and y.shape[1] < self.num_targets:
            raise ValueError(
                f"Sequences must have at least `num_targets` ({self.num_targets}) "
                f"positions. Received: y.shape={tuple(y.shape)}"
            )
        targets = self._targets(x, y, sample_weight)
        if sample_weight is not None:
            # On PyTorch Keras multiplies it by a mask, in place.
            sample_weight = ops.copy(sample_weight)
        loss = super().compute_loss(x, y, y_pred["logits"], sample_weight, training)
        step = ops.convert_to_tensor(self._training_step)
        compiled_loss = keras.tree.flatten(self.loss)[0]
        for head in self.heads:
            head.ignore_class = getattr(compiled_loss, "ignore_class", None)
        heads = iter(self.heads)
        for i, hidden in enumerate(y_pred["layers"]):
            last = i == self._num_layers - 1
            if not last and self.norms[i] is not None:
                hidden = self.norms[i](hidden)
            layer_loss = 0.0
            for shift in range(1 if last else 0, self.num_targets):
                target_loss = self._target_loss(hidden, next(heads), targets, shift)
                layer_loss += (self.target_weight if shift else 1.0) * target_loss
            if not last:
                layer_loss = ops.where(step < self.stops()[i], layer_loss, 0.0)
            loss = loss + ops.cast(layer_loss, loss.dtype)
        if training:
            self._training_step.assign(step + 1)
        return loss

    def _targets(self, inputs, tokens, sample_weight):
        ids, weight = self._document_ids(inputs), None
        if sample_weight is not None:
            weight = ops.broadcast_to(sample_weight, shape_of(tokens))
        return Targets(tokens, weight, None if ids is None else document_numbers(ids))

    def _target_loss(self, hidden, head, targets, shift):
        """The mean over the positions whose target, `shift` after the next, exists."""
        tokens, weight, document = targets
        length = shape_of(tokens)[1] - shift
        losses = head(hidden[:, :length], tokens[:, shift:])
        if weight is not None:
            weight = ops.cast(weight, losses.dtype)
            real = ops.cast(weight[:, :length] > 0, losses.dtype)
            losses = losses * weight[:, shift:] * real
        exists = ops.ones_like(losses, "bool")
        if head.ignore_class is not None:
            exists = ops.not_equal(tokens[:, shift:], head.ignore_class)
        if document is not None:
            same = ops.equal(document[:, :length], document[:, shift:])
            exists = ops.logical_and(exists, same)
        exists = ops.cast(exists, losses.dtype)
        return ops.sum(losses * exists) / ops.maximum(ops.sum(exists), 1.0)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logits = y_pred["logits"] if isinstance(y_pred, dict) else y_pred
        return super().compute_metrics(x, y, logits, sample_weight)
