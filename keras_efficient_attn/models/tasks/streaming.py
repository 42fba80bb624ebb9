"""Generation with the states of a backbone's decoder as cache."""

import keras_hub
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of

# Segment sizes for reading prompts: each time the largest that fits.
PROMPT_SEGMENTS = (1024, 128, 16, 1)
# Additional cache entries of a decoder with an encoder.
MEMORY = ("memory", "memory_padding_mask")


class StreamingMixin:
    """Tasks whose cache is the state of their backbone's decoder.

    Put it before KerasHub's `CausalLM` in the list of base classes.
    """

    def get_initial_cache(self, batch_size, max_length=None):
        """The cache before the first token.

        Args:
            batch_size: Rows in the batch.
            max_length: Tokens that the cache can hold, for layers whose state grows.

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
            cache: From `get_initial_cache` or the previous call. Layers with a state of
                constant size cannot repeat or skip a position.
            cache_update_index: Position of the first token, an integer or a scalar:
                the number of tokens that the cache has read. Other values give NaN
                outputs.

        Returns:
            `(logits, hidden_states, cache)`: `(batch, length, vocabulary_size)`,
            `(batch, length, hidden_dim)`, and the new cache.
        """
        memory = {name: cache[name] for name in MEMORY if name in cache}
        hidden_states, state = self.backbone.stream(token_ids, cache["state"], **memory)
        position = cache["position"]
        follows = position == ops.cast(cache_update_index, "int32")
        # A compiled program cannot raise.
        nan = ops.cast(float("nan"), hidden_states.dtype)
        hidden_states = ops.where(follows[:, None, None], hidden_states, nan)
        logits = self.backbone.token_embedding(hidden_states, reverse=True)
        position = position + shape_of(token_ids)[1]
        return logits, hidden_states, {**cache, "state": state, "position": position}

    def read_prompt(self, token_ids, cache, count):
        """The cache after the first tokens of each row.

        Args:
            token_ids: Integers `(batch, max_length)`.
            cache: From `get_initial_cache`.
            count: Number of tokens to read, an integer or a scalar tensor.
        """
        batch_size, max_length = shape_of(token_ids)
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

    def complete(self, token_ids, padding_mask, cache, stop_token_ids, hidden_states):
        """Samples the tokens after the prompts.

        Args:
            token_ids: Integers `(batch, max_length)`.
            padding_mask: `(batch, max_length)`, 1 at prompt tokens.
            cache: From `get_initial_cache`.
            stop_token_ids: As in `generate_step`.
            hidden_states: Callable that returns the hidden states of all tokens,
                `(batch, max_length, hidden_dim)`, for samplers that use them.

        Returns:
            `(token_ids, padding_mask)`, both `(batch, max_length)`.
        """
        padding_mask = ops.cast(padding_mask, "bool")
        lengths = ops.sum(ops.cast(padding_mask, "int32"), axis=-1)
        # The first position without a prompt token.
        index = ops.maximum(ops.cast(ops.min(lengths), "int32"), 1)
        compares = isinstance(self.sampler, keras_hub.samplers.ContrastiveSampler)
        # Read all tokens except the last into the state; the sampler feeds the last.
        cache = self.read_prompt(token_ids, cache, index - 1)

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
            hidden_states=hidden_states() if compares else None,
            model=self,
        )
        return token_ids, _until_stop(token_ids, padding_mask, stop_token_ids)


def _until_stop(token_ids, prompt_mask, stop_token_ids):
    """Whether each token is not after a generated stop token."""
    stops = ops.zeros_like(prompt_mask)
    for stop in stop_token_ids or ():
        stops = ops.logical_or(stops, ops.equal(token_ids, stop))
    stops = ops.logical_and(stops, ops.logical_not(prompt_mask))
    stops = ops.cast(stops, "int32")
    earlier = ops.cumsum(stops, axis=-1) - stops
    return ops.equal(earlier, 0)
