"""A causal language model that uses its layers' states as cache."""

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.tasks.byte_tokenizer import EfficientByteTokenizer
from keras_efficient_attn.models.tasks.task import StreamingMixin, TaskMixin
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_bool


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientCausalLMPreprocessor(keras_hub.models.CausalLMPreprocessor):
    """Strings to `token_ids` and `padding_mask`, and the next tokens as labels.

    Args:
        tokenizer, sequence_length: A tokenizer, and the number of tokens per row, start
            and end included. The length defaults to 1024.
        pack: Whether to fill each row with several texts, one after the other: fewer
            rows than texts, with `document_ids` for a backbone with `takes_documents`.
            A text is in one row, and the loss does not cross from one to the next.
            Defaults to `False`.
        **kwargs: Arguments of `keras_hub.models.CausalLMPreprocessor`, such as whether
            to add start and end.

    Raises:
        ValueError: If `pack` is not a boolean; on a call with `pack`, for one text
            instead of a batch.

    Example:

    ```python
    from keras_efficient_attn.models import (
        EfficientByteTokenizer,
        EfficientCausalLMPreprocessor,
    )

    preprocessor = EfficientCausalLMPreprocessor(
        EfficientByteTokenizer(), sequence_length=16
    )
    x, y, sample_weight = preprocessor(["some text"])
    ```

    Texts are packed within a batch: pack large ones, and batch the rows.

    ```python
    import tensorflow as tf

    texts = tf.data.Dataset.from_tensor_slices(["some text", "more of it"])
    preprocessor = EfficientCausalLMPreprocessor(
        EfficientByteTokenizer(), sequence_length=1024, pack=True
    )
    rows = texts.batch(1000).map(preprocessor).unbatch().batch(16)
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    tokenizer_cls = EfficientByteTokenizer

    def __init__(
        self, tokenizer, sequence_length: int = 1024, *, pack: bool = False, **kwargs
    ):
        super().__init__(tokenizer, sequence_length, **kwargs)
        check_bool("pack", pack)
        self.pack = pack

    def _call_python(self, x, *args, **kwargs):
        rows = super()._call_python(x, *args, **kwargs)
        if not self.pack:
            return rows
        x, y, exists = rows
        tokens = x["token_ids"]
        if len(tokens.shape) == 1:
            raise ValueError(
                "`x` must be a batch of texts, because pack=True packs those of a "
                "batch: pass a list, or call `batch` of a dataset before `map`. "
                "Received: x is one text"
            )
        if not (isinstance(y, np.ndarray) or hasattr(y, "numpy")):
            # A dataset is mapped by a graph of TensorFlow.
            import tensorflow as tf

            packed = tf.numpy_function(
                _pack_rows, [tokens, y, exists], [tokens.dtype] * 2 + [tf.int32] * 2
            )
            for part in packed:
                part.set_shape((None, tokens.shape[-1]))
        else:
            packed = _pack_rows(*map(np.asarray, (tokens, y, exists)))
        tokens, y, ids, exists = packed
        x = {"token_ids": tokens, "padding_mask": exists > 0, "document_ids": ids}
        return keras.utils.pack_x_y_sample_weight(x, y, exists > 0)

    def get_config(self):
        return {**super().get_config(), "pack": self.pack}


def _pack_rows(tokens, labels, exists):
    """Rows of several documents: each goes to the first row with room.

    Args:
        tokens, labels: Integers `(documents, length)`.
        exists: `(documents, length)`, 1 for positions with a label, at the beginning.

    Returns:
        `(tokens, labels, ids, exists)`, each `(rows, length)`.
    """
    length, used, number, places = exists.shape[1], [], [], []
    for count in exists.sum(axis=1):
        room = np.flatnonzero(np.array(used, int) + count <= length)
        row = room[0] if len(room) else len(used)
        if not len(room):
            used.append(0)
            number.append(0)
        places.append((row, slice(used[row], used[row] + count), number[row]))
        used[row] += count
        number[row] += 1
    packed = [np.zeros((len(used), length), t.dtype) for t in (tokens, labels)]
    ids, filled = (np.zeros((len(used), length), "int32") for _ in range(2))
    for document, (row, own, index) in enumerate(places):
        for new, old in zip(packed, (tokens, labels), strict=True):
            new[row, own] = old[document, : own.stop - own.start]
        # Padding has the next number.
        ids[row, own], ids[row, own.stop :] = index, index + 1
        filled[row, own] = 1
    return *packed, ids, filled


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientCausalLM(StreamingMixin, TaskMixin, keras_hub.models.CausalLM):
    """Language model on `EfficientTransformerBackbone`, with KerasHub's `generate`.

    `generate` reads the prompt in segments, then one token at a time, with the layers'
    states as its cache. With layers whose state does not grow with the context, a token
    takes constant time and memory. Up to rounding, calls on the whole sequence give the
    same tokens. A softmax layer's state is a key/value cache of the full length.

    Rows of a batch may have prompts of different lengths, padded anywhere: they are
    read at once, and each step gives every row a token. A row's tokens are those of its
    prompt alone. An empty prompt starts from the padding token.

    Args:
        backbone: An `EfficientTransformerBackbone` with `architecture="decoder"`.
        preprocessor: An `EfficientCausalLMPreprocessor`, or `None` for inputs that are
            dicts of `token_ids` and `padding_mask`.
        **kwargs: Arguments of KerasHub's tasks.

    Returns:
        On a call, float32 logits `(batch, length, vocabulary_size)`.

    Raises:
        ValueError: If the backbone is not causal; from `generate`, if one of its
            layers does not stream.

    Example:

    ```python
    from keras_efficient_attn import models

    backbone = models.EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
    )
    preprocessor = models.EfficientCausalLMPreprocessor(
        models.EfficientByteTokenizer(), sequence_length=100
    )
    model = models.EfficientCausalLM(backbone, preprocessor)
    model.compile(sampler="top_k")
    model.generate(["def ", "import "], max_length=50)
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    preprocessor_cls = EfficientCausalLMPreprocessor

    def __init__(self, backbone, preprocessor=None, **kwargs):
        self.set_parts(backbone, preprocessor, "decoder")
        inputs = backbone.input
        outputs = backbone.token_embedding(backbone(inputs), reverse=True)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)

    def score(
        self,
        token_ids,
        padding_mask=None,
        scoring_mode="logits",
        layer_intercept_fn=None,
        target_ids=None,
    ):
        """Scores given tokens, like KerasHub's causal language models.

        Args:
            token_ids: Integers `(batch, length)`.
            padding_mask: Optional boolean `(batch, length)`, false at padding.
                Defaults to no padding.
            scoring_mode: `"logits"` (the default) or `"loss"`, per token.
            layer_intercept_fn: Optional callable `(x, i) -> x` of activations `(batch,
                length, hidden_dim)`: `i` is −1 for the embeddings and counts the
                blocks from 0. Unsupported for reversible or adaptive stacks, which have
                no such activations.
            target_ids: Integers `(batch, length)`, the tokens to predict; needed by
                `"loss"`.

        Returns:
            Logits `(batch, length, vocabulary_size)`, or losses `(batch, length)`.

        Raises:
            ValueError: For an unknown `scoring_mode`, `"loss"` without `target_ids`, or
                a `layer_intercept_fn` for a stack without such activations.
        """
        if scoring_mode not in ("logits", "loss"):
            raise ValueError(
                "`scoring_mode` must be 'logits' or 'loss'. Received: "
                f"scoring_mode={scoring_mode!r}"
            )
        if scoring_mode == "loss" and target_ids is None:
            raise ValueError(
                "`scoring_mode='loss'` needs `target_ids`. Received: target_ids=None"
            )
        if padding_mask is None:
            padding_mask = ops.ones_like(token_ids)
        inputs = {"token_ids": token_ids, "padding_mask": padding_mask}
        if layer_intercept_fn is None:
            logits = self(inputs)
        else:
            hidden = self._intercept(inputs, layer_intercept_fn)
            logits = self.backbone.token_embedding(hidden, reverse=True)
        if scoring_mode == "logits":
            return logits
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        return loss(target_ids, logits)

    def _intercept(self, inputs, layer_intercept_fn):
        """The backbone's output, with a function applied to all activations."""
        stack = self.backbone.decoder
        if not stack.returns_layers or stack.is_reversible:
            raise ValueError(
                "`layer_intercept_fn` needs a stack with an output per layer, which "
                "reversible stacks and a `UniversalTransformer` do not have. Received: "
                f"layer_intercept_fn={layer_intercept_fn!r}"
            )
        mask = ops.cast(inputs["padding_mask"], "bool")
        x = self.backbone.embedding(inputs["token_ids"], padding_mask=mask)
        x = layer_intercept_fn(x, -1)
        for i, block in enumerate(stack.blocks * stack.num_recurrences):
            x = layer_intercept_fn(block(x, padding_mask=mask), i)
        return x if stack.final_norm is None else stack.final_norm(x)

    def generate_step(self, inputs, stop_token_ids=None):
        """Generates for one batch; compiled where the backend compiles.

        Args:
            inputs: Dict of `token_ids` and `padding_mask`, `(batch, max_length)`.
            stop_token_ids: Optional stop tokens; generation ends when each row has
                generated one.

        Returns:
            A dict with the same entries.
        """
        token_ids, padding_mask = self.complete(
            inputs["token_ids"],
            inputs["padding_mask"],
            self.get_initial_cache(*shape_of(inputs["token_ids"])),
            stop_token_ids,
            lambda: self.backbone(inputs),
        )
        return {"token_ids": token_ids, "padding_mask": padding_mask}
