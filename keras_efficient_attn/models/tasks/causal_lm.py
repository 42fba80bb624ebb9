"""A causal language model that generates from its layers' states."""

import keras
import keras_hub
from keras import ops

from keras_efficient_attn.models.backbone import EfficientTransformerBackbone
from keras_efficient_attn.models.tasks.byte_tokenizer import (
    EfficientCausalLMPreprocessor,
)
from keras_efficient_attn.models.tasks.task import TaskMixin

# Tokens of a prompt that are read at once; the rest of it one by one.
PROMPT_CHUNK = 64


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
    from keras_efficient_attn.models import (
        EfficientByteTokenizer,
        EfficientCausalLM,
        EfficientCausalLMPreprocessor,
        EfficientTransformerBackbone,
    )

    backbone = EfficientTransformerBackbone(256, 2, 4, 64, 256)
    preprocessor = EfficientCausalLMPreprocessor(
        EfficientByteTokenizer(), sequence_length=100
    )
    model = EfficientCausalLM(backbone, preprocessor)
    model.compile(sampler="top_k")
    model.generate(["def ", "import "], max_length=50)
    ```
    """

    backbone_cls = EfficientTransformerBackbone
    preprocessor_cls = EfficientCausalLMPreprocessor

    def __init__(self, backbone, preprocessor=None, **kwargs):
        if backbone.architecture != "decoder":
            raise ValueError(
                "A causal language model needs a backbone with "
                "architecture='decoder'. Received: "
                f"architecture={backbone.architecture!r}"
            )
        self.backbone = backbone
        self.preprocessor = preprocessor
        inputs = backbone.input
        outputs = backbone.token_embedding(backbone(inputs), reverse=True)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)

    def call_with_cache(self, token_ids, cache):
        """Reads the next tokens of a sequence.

        Args:
            token_ids: Integers `(batch, length)`.
            cache: The backbone's state before them; it knows its position.

        Returns:
            `(logits, hidden_states, cache)`: `(batch, length, vocabulary_size)`,
            `(batch, length, hidden_dim)`, and the state after them.
        """
        hidden_states, cache = self.backbone.stream(token_ids, cache)
        logits = self.backbone.token_embedding(hidden_states, reverse=True)
        return logits, hidden_states, cache

    def read_prompt(self, token_ids, count):
        """The cache after the first tokens of each row.

        Args:
            token_ids: Integers `(batch, max_length)`.
            count: How many tokens to read, an integer or a scalar tensor.
        """
        batch_size, max_length = ops.shape(token_ids)
        cache = self.backbone.get_initial_state(batch_size, max_length)
        start = ops.convert_to_tensor(0, "int32")
        count = ops.cast(count, "int32")
        for size in (PROMPT_CHUNK, 1):
            if size <= max_length:
                start, cache = ops.while_loop(
                    lambda start, cache, size=size: start + size <= count,
                    lambda start, cache, size=size: (
                        start + size,
                        self.backbone.stream(
                            ops.slice(token_ids, (0, start), (batch_size, size)),
                            cache,
                        )[1],
                    ),
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
            token = ops.slice(prompt, (0, index - 1), (ops.shape(prompt)[0], 1))
            logits, hidden, cache = self.call_with_cache(token, cache)
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
