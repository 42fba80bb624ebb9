"""A causal language model that generates from its layers' states."""

import keras
import keras_hub
from keras import ops

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.tasks.byte_tokenizer import (
    EfficientCausalLMPreprocessor,
)
from keras_efficient_attn.models.tasks.task import TaskMixin
from keras_efficient_attn.ops.common.backend import shape_of

# Tokens of a prompt that are read at once: the largest number that is left, each time.
PROMPT_SEGMENTS = (1024, 128, 16, 1)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class EfficientCausalLM(TaskMixin, keras_hub.models.CausalLM):
    """Language model on `EfficientTransformerBackbone`, with KerasHub's `generate`.

    `generate` reads the prompt in segments, and then a token at a time, with the
    layers' states as its cache: with layers whose state does not grow with the
    context, a token takes constant time and memory, however many came before. It
    gives the tokens that calls on the whole sequence give, up to rounding. A softmax
    layer's state is a key/value cache of the full length.

    Rows of a batch may have prompts of different lengths: generation starts at the
    end of the shortest, and keeps the tokens of the longer ones. An empty prompt
    starts from the padding token in its place.

    Args:
        backbone: An `EfficientTransformerBackbone` with `architecture="decoder"`.
        preprocessor: An `EfficientCausalLMPreprocessor`, or `None` for inputs that are
            dicts of `token_ids` and `padding_mask`.
        **kwargs: Those of KerasHub's tasks.

    Returns:
        On a call, float32 logits `(batch, length, vocabulary_size)`.

    Raises:
        ValueError: If the backbone is not causal; from `generate`, if one of its
            layers does not stream.

    Example:

    ```python
    from keras_efficient_attn import models

    backbone = models.EfficientTransformerBackbone(256, 2, 4, 64, 256)
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
        self.take_parts(backbone, preprocessor, "decoder")
        inputs = backbone.input
        outputs = backbone.token_embedding(backbone(inputs), reverse=True)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)

    def get_initial_cache(self, batch_size, max_length=None):
        """The cache before the first token.

        Args:
            batch_size: Rows in the batch.
            max_length: Tokens that it can hold, for layers whose state grows.

        Returns:
            Dict of `state`, the backbone's, and `position` `(batch,)`, the number of
            tokens read.
        """
        return {
            "state": self.backbone.get_initial_state(batch_size, max_length),
            "position": ops.zeros((batch_size,), "int32"),
        }

    def call_with_cache(self, token_ids, cache, cache_update_index):
        """Reads the next tokens of a sequence.

        Args:
            token_ids: Integers `(batch, length)`.
            cache: From `get_initial_cache` or the previous call. Layers with a state
                of constant size cannot read a position again, or leave one out.
            cache_update_index: Position of the first token, an integer or a scalar:
                the number of tokens that the cache has read. Outputs for any other
                are NaN.

        Returns:
            `(logits, hidden_states, cache)`: `(batch, length, vocabulary_size)`,
            `(batch, length, hidden_dim)`, and the cache after them.
        """
        hidden_states, state = self.backbone.stream(token_ids, cache["state"])
        position = cache["position"]
        follows = position == ops.cast(cache_update_index, "int32")
        # A compiled program cannot raise.
        nan = ops.cast(float("nan"), hidden_states.dtype)
        hidden_states = ops.where(follows[:, None, None], hidden_states, nan)
        logits = self.backbone.token_embedding(hidden_states, reverse=True)
        position = position + shape_of(token_ids)[1]
        return logits, hidden_states, {"state": state, "position": position}

    def score(
        self,
        token_ids,
        padding_mask=None,
        scoring_mode="logits",
        layer_intercept_fn=None,
        target_ids=None,
    ):
        """Scores given tokens, as the causal language models of KerasHub do.

        Args:
            token_ids: Integers `(batch, length)`.
            padding_mask: Optional boolean `(batch, length)`, false at padding.
                Defaults to no padding.
            scoring_mode: `"logits"` (the default) or `"loss"`, per token.
            layer_intercept_fn: Optional callable `(x, i) -> x` of activations `(batch,
                length, hidden_dim)`: `i` is −1 for the embeddings and counts the
                blocks from 0. Not for reversible or adaptive stacks, which have no
                such activations.
            target_ids: Integers `(batch, length)`, the tokens to predict; needed by
                `"loss"`.

        Returns:
            Logits `(batch, length, vocabulary_size)`, or losses `(batch, length)`.

        Raises:
            ValueError: For an unknown `scoring_mode`, `"loss"` without `target_ids`, or
                a `layer_intercept_fn` where there is nothing to intercept.
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
            hidden = self._intercepted(inputs, layer_intercept_fn)
            logits = self.backbone.token_embedding(hidden, reverse=True)
        if scoring_mode == "logits":
            return logits
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        return loss(target_ids, logits)

    def _intercepted(self, inputs, layer_intercept_fn):
        """The backbone's output, each block's activations going through a function."""
        stack = self.backbone.decoder
        if not stack.returns_layers or stack.blocks[0].residual == "reversible":
            raise ValueError(
                "`layer_intercept_fn` needs blocks with activations of their own, "
                "which reversible and adaptive stacks do not have. Received: "
                f"layer_intercept_fn={layer_intercept_fn!r}"
            )
        mask = ops.cast(inputs["padding_mask"], "bool")
        x = layer_intercept_fn(self.backbone.embedding(inputs["token_ids"]), -1)
        for i, block in enumerate(stack.blocks * stack.num_recurrences):
            x = layer_intercept_fn(block(x, padding_mask=mask), i)
        return x if stack.final_norm is None else stack.final_norm(x)

    def read_prompt(self, token_ids, count):
        """The cache after the first tokens of each row.

        Args:
            token_ids: Integers `(batch, max_length)`.
            count: How many tokens to read, an integer or a scalar tensor.
        """
        batch_size, max_length = shape_of(token_ids)
        cache = self.get_initial_cache(batch_size, max_length)
        start = ops.convert_to_tensor(0, "int32")
        count = ops.cast(count, "int32")

        def read(size):
            def body(start, cache):
                tokens = ops.slice(token_ids, (0, start), (batch_size, size))
                return start + size, self.call_with_cache(tokens, cache, start)[2]

            return body

        for size in PROMPT_SEGMENTS:
            if size <= max_length:
                start, cache = ops.while_loop(
                    lambda start, cache, size=size: start + size <= count,
                    read(size),
                    (start, cache),
                )
        return cache

    def generate_step(self, inputs, stop_token_ids=None):
        """Generates for one batch; compiled where the backend compiles.

        Args:
            inputs: Dict of `token_ids` and `padding_mask`, `(batch, max_length)`.
            stop_token_ids: Optional; generation ends when each row has had one.

        Returns:
            A dict of the same entries.
        """
        token_ids = inputs["token_ids"]
        padding_mask = ops.cast(inputs["padding_mask"], "bool")
        lengths = ops.sum(ops.cast(padding_mask, "int32"), axis=-1)
        # The first position without a token of a prompt.
        index = ops.maximum(ops.cast(ops.min(lengths), "int32"), 1)
        hidden_states = None
        if isinstance(self.sampler, keras_hub.samplers.ContrastiveSampler):
            # It compares with the hidden states of all earlier positions.
            hidden_states = self.backbone(inputs)
        # The state takes the tokens before the last; the sampler feeds the last.
        cache = self.read_prompt(token_ids, index - 1)

        def next_token(prompt, cache, index):
            token = ops.slice(prompt, (0, index - 1), (shape_of(prompt)[0], 1))
            logits, hidden, cache = self.call_with_cache(token, cache, index - 1)
            return ops.squeeze(logits, axis=1), ops.squeeze(hidden, axis=1), cache

        token_ids = self.sampler(
            next=next_token,
            prompt=token_ids,
            cache=cache,
            index=index,
            mask=padding_mask,
            stop_token_ids=stop_token_ids,
            hidden_states=hidden_states,
            model=self,
        )
        padding_mask = _until_stop(token_ids, padding_mask, stop_token_ids)
        return {"token_ids": token_ids, "padding_mask": padding_mask}


def _until_stop(token_ids, prompt_mask, stop_token_ids):
    """Which tokens are not after a stop token that was generated."""
    stops = ops.zeros_like(prompt_mask)
    for stop in stop_token_ids or ():
        stops = ops.logical_or(stops, ops.equal(token_ids, stop))
    stops = ops.logical_and(stops, ops.logical_not(prompt_mask))
    stops = ops.cast(stops, "int32")
    earlier = ops.cumsum(stops, axis=-1) - stops
    return ops.equal(earlier, 0)
