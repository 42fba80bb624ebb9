"""What tasks have in common, and the base of models around a task."""

import keras
import keras_hub
from keras import ops

from keras_efficient_attn.models.files import PresetMixin
from keras_efficient_attn.ops.common.backend import shape_of

# Lengths of the segments in which prompts are read.
PROMPT_SEGMENTS = (1024, 128, 16, 1)
# Additional cache entries of a decoder with an encoder.
MEMORY = ("memory", "memory_padding_mask")


class TaskMixin(PresetMixin):
    """Adds shipped presets, any kind of data, and resumable training to tasks.

    A task that is saved as `.keras` and loaded is compiled as before, with the state of
    its optimizer; KerasHub's own tasks load with a new optimizer.

    KerasHub's tasks read arrays and datasets through `tf.data` or Grain, for the
    preprocessor. A task without a preprocessor needs neither: it then accepts all
    inputs of `keras.Model`, including generators and `keras.utils.PyDataset`.
    """

    def set_parts(self, backbone, preprocessor, *architectures):
        """Stores the parts of a task, if the backbone has a supported architecture.

        Raises:
            ValueError: If the backbone has another architecture.
        """
        if backbone.architecture not in architectures:
            raise ValueError(
                f"{type(self).__name__} needs a backbone with architecture="
                f"{' or '.join(map(repr, architectures))}. Received: "
                f"architecture={backbone.architecture!r}"
            )
        self.backbone = backbone
        self.preprocessor = preprocessor

    def fit(self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs):
        """As `keras.Model.fit`; strings go through the preprocessor."""
        data = dict(x=x, y=y, batch_size=batch_size, sample_weight=sample_weight)
        if self.preprocessor is None:
            return keras.Model.fit(self, **data, **kwargs)
        return super().fit(**data, **kwargs)

    def evaluate(self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs):
        """As `keras.Model.evaluate`; strings go through the preprocessor."""
        data = dict(x=x, y=y, batch_size=batch_size, sample_weight=sample_weight)
        if self.preprocessor is None:
            return keras.Model.evaluate(self, **data, **kwargs)
        return super().evaluate(**data, **kwargs)

    def predict(self, x, batch_size=None, **kwargs):
        """As `keras.Model.predict`; strings go through the preprocessor."""
        if self.preprocessor is None:
            return keras.Model.predict(self, x, batch_size=batch_size, **kwargs)
        return super().predict(x, batch_size=batch_size, **kwargs)

    def get_compile_config(self):
        """The arguments of `compile`, including the sampler."""
        config = super().get_compile_config()
        if config and hasattr(self, "sampler"):
            config["sampler"] = keras.saving.serialize_keras_object(self.sampler)
        return config

    def compile_from_config(self, config):
        """Compiles with the result of `get_compile_config`."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)


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

        def read(segment, cache, start):
            return self.call_with_cache(segment, cache, start)[2]

        # Read all tokens except the last into the state; the sampler feeds the last.
        cache = read_in_segments(read, token_ids, cache, index - 1, PROMPT_SEGMENTS)

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


def read_in_segments(read, token_ids, cache, count, lengths):
    """The cache after the first tokens of each row, which are read in segments.

    Args:
        read: Called with a segment `(batch, length)`, a cache and the position of the
            segment; returns the next cache.
        token_ids: Integers `(batch, max_length)`.
        cache: The cache before the first token, a nest of tensors.
        count: Number of tokens to read, an integer or a scalar tensor.
        lengths: Lengths of segments, the longest first and 1 at the end: each time the
            longest that fits.
    """
    batch_size, max_length = shape_of(token_ids)
    start, count = ops.zeros((), "int32"), ops.cast(count, "int32")
    for length in lengths:
        if length > max_length:
            continue

        def is_left(start, cache, length=length):
            return start + length <= count

        def read_segment(start, cache, length=length):
            segment = ops.slice(token_ids, (0, start), (batch_size, length))
            return start + length, read(segment, cache, start)

        start, cache = ops.while_loop(is_left, read_segment, (start, cache))
    return cache


def _until_stop(token_ids, prompt_mask, stop_token_ids):
    """Whether each token is not after a generated stop token."""
    stops = ops.zeros_like(prompt_mask)
    for stop in stop_token_ids or ():
        stops = ops.logical_or(stops, ops.equal(token_ids, stop))
    stops = ops.logical_and(stops, ops.logical_not(prompt_mask))
    stops = ops.cast(stops, "int32")
    earlier = ops.cumsum(stops, axis=-1) - stops
    return ops.equal(earlier, 0)


class TaskWrapper(keras.Model):
    """Base of models around a task: the task is saved with them.

    In a subclass, `task_argument` names the argument and attribute that hold the task.
    """

    task_argument = None

    def get_config(self):
        task = keras.saving.serialize_keras_object(getattr(self, self.task_argument))
        # Otherwise the loaded task would have its own optimizer for all weights.
        task.pop("compile_config", None)
        return {**super().get_config(), self.task_argument: task}

    @classmethod
    def from_config(cls, config):
        task = keras.saving.deserialize_keras_object(config[cls.task_argument])
        return cls(**{**config, cls.task_argument: task})
