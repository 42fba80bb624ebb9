"""What tasks have in common, and the base of models around a task."""

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.models.checkpoints.conversion import OVERRIDES
from keras_efficient_attn.models.checkpoints.tokenizer import (
    preprocessor_of,
    without_tokenizer,
)
from keras_efficient_attn.models.files import OptionalDocuments, PresetMixin
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.rows import RowOrder, row_lengths, take_rows

# Lengths of the segments in which prompts are read.
PROMPT_SEGMENTS = (1024, 128, 16, 1)
# Additional cache entries of a decoder with an encoder.
MEMORY = ("memory", "memory_padding_mask")


class TaskMixin(OptionalDocuments, KeepsQuantization, PresetMixin):
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

    @classmethod
    def from_checkpoint(cls, preset, config, load_weights, **kwargs):
        """What `from_preset` does with a checkpoint whose `config.json` is `config`."""
        given = {name: kwargs.pop(name) for name in OVERRIDES if name in kwargs}
        backbone = cls.backbone_cls.from_checkpoint(
            preset, config, load_weights, **given
        )
        if "preprocessor" not in kwargs:
            kwargs["preprocessor"] = preprocessor_of(
                cls.preprocessor_cls, preset, config
            )
        return cls(backbone=backbone, **kwargs)

    def export_to_transformers(self, path, max_shard_size=5_000_000_000):
        """Writes the model in the format of transformers; as the backbone's."""
        self.backbone.export_to_transformers(path, max_shard_size)

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

    def get_quantization_layer_structure(self, mode):
        """What `quantize("gptq")` and `quantize("awq")` run and calibrate, a dict.

        `None` for an encoder with a decoder, as in KerasHub: Keras then asks for a
        `quantization_layer_structure` in the `config`.
        """
        if mode not in ("gptq", "awq") or (
            self.backbone.architecture == "encoder_decoder"
        ):
            return None
        stack = self.backbone.decoder or self.backbone.encoder
        blocks = stack.blocks
        if not stack.returns_layers or stack.blocks[0].residual == "reversible":
            blocks = [stack]
        return {
            # KerasHub's own has the embedding of tokens, without positions.
            "pre_block_layers": [self.backbone.embedding],
            "sequential_blocks": blocks,
        }

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
            cache_update_index: Position of the first token, an integer, a scalar, or
                integers `(batch,)`: the number of tokens that the cache has read. Rows
                with other values give NaN outputs.

        Returns:
            `(logits, hidden_states, cache)`: `(batch, length, vocabulary_size)`,
            `(batch, length, hidden_dim)`, and the new cache.
        """
        follows = cache["position"] == ops.cast(cache_update_index, "int32")
        hidden_states, cache = self._read(token_ids, cache)
        # A compiled program cannot raise.
        nan = ops.cast(float("nan"), hidden_states.dtype)
        hidden_states = ops.where(follows[:, None, None], hidden_states, nan)
        logits = self.backbone.token_embedding(hidden_states, reverse=True)
        return logits, hidden_states, cache

    def _read(self, token_ids, cache, padding_mask=None):
        """The hidden states of the next tokens, and the new cache."""
        memory = {name: cache[name] for name in MEMORY if name in cache}
        hidden_states, state = self.backbone.stream(
            token_ids, cache["state"], padding_mask=padding_mask, **memory
        )
        read = shape_of(token_ids)[1]
        if padding_mask is not None:
            read = row_lengths(padding_mask)
        position = cache["position"] + read
        return hidden_states, {**cache, "state": state, "position": position}

    def complete(self, token_ids, padding_mask, cache, stop_token_ids, hidden_states):
        """Samples the tokens after the prompts.

        The prompts are read at once. Then all rows get a token in each step, until the
        shortest prompt has `max_length` tokens; what longer ones get beyond that length
        is dropped.

        Args:
            token_ids: Integers `(batch, max_length)`.
            padding_mask: `(batch, max_length)`, 1 at prompt tokens, anywhere in a row.
            cache: From `get_initial_cache`.
            stop_token_ids: As in `generate_step`.
            hidden_states: Callable that returns the hidden states of all tokens,
                `(batch, max_length, hidden_dim)`, for samplers that use them.

        Returns:
            `(token_ids, padding_mask)`, both `(batch, max_length)`: prompts from the
            first position on, followed by the new tokens.
        """
        order = RowOrder.of(padding_mask)
        token_ids = order.to_front(token_ids)
        batch_size, max_length = shape_of(token_ids)
        # An empty prompt starts from the padding token.
        lengths = ops.maximum(row_lengths(padding_mask), 1)
        steps = ops.arange(max_length, dtype="int32")

        def read(segment, cache, start):
            step = start + ops.arange(shape_of(segment)[1], dtype="int32")
            return self._read(segment, cache, step < lengths[:, None] - 1)[1]

        # Read all tokens except the last into the state; the sampler feeds the last.
        count = ops.max(lengths, initial=1) - 1
        cache = read_in_segments(read, token_ids, cache, count, PROMPT_SEGMENTS)

        # The sampler sees prompts that all end before the position `index`.
        compares = isinstance(self.sampler, keras_hub.samplers.ContrastiveSampler)
        shortest = ops.cast(ops.min(lengths, initial=max_length), "int32")
        # A sampler that compares a token with all before it needs the whole prompts.
        index = shortest + max_length if compares else shortest
        columns = ops.arange(2 * max_length if compares else max_length, dtype="int32")
        position = columns + (lengths[:, None] - index)
        within = ops.clip(position, 0, max_length - 1)
        if compares:
            hidden_states = take_rows(within, order.to_front(hidden_states()))[0]
        made = self.sampler(
            next=self._next_token(max_length, stop_token_ids),
            prompt=take_rows(within, token_ids)[0],
            cache=cache,
            index=index,
            mask=ops.broadcast_to(columns < index, shape_of(within)),
            stop_token_ids=stop_token_ids,
            hidden_states=hidden_states if compares else None,
            model=self,
        )
        is_prompt = steps < lengths[:, None]
        column = ops.clip(steps + index - lengths[:, None], 0, shape_of(made)[1] - 1)
        token_ids = ops.where(is_prompt, token_ids, take_rows(column, made)[0])
        is_prompt = ops.logical_and(
            is_prompt, steps < row_lengths(padding_mask)[:, None]
        )
        return token_ids, _until_stop(token_ids, is_prompt, stop_token_ids)

    def _next_token(self, max_length, stop_token_ids):
        """The function by which a sampler reads a token and gets the next's logits."""

        def next_token(prompt, cache, index):
            token = ops.slice(prompt, (0, index - 1), (shape_of(prompt)[0], 1))
            hidden, cache = self._read(token, cache)
            logits = self.backbone.token_embedding(hidden, reverse=True)
            # A row that is complete stops: its cache has no room for more tokens.
            done = (cache["position"] >= max_length)[:, None]
            stop = ops.zeros_like(logits[:1, 0])
            if stop_token_ids:
                size = logits.shape[-1]
                stop = 100.0 * ops.one_hot([stop_token_ids[0]], size, dtype=stop.dtype)
            logits = ops.where(done, stop, logits[:, 0])
            lost = (cache["position"] > max_length)[:, None]
            hidden = ops.where(lost, ops.ones_like(hidden[:, 0]), hidden[:, 0])
            return logits, hidden, cache

        return next_token

    def generate(self, inputs, max_length=None, stop_token_ids="auto", **kwargs):
        """As KerasHub's; prompts may be padded anywhere, and `max_length` is honoured.

        Args:
            inputs: Strings; without a preprocessor, a dict of token ids and padding
                mask.
            max_length: Tokens per row, prompt included. Defaults to `None`: the
                preprocessor's `sequence_length`, or the length of the given rows.
            stop_token_ids: As for KerasHub's tasks.
            **kwargs: Further arguments of KerasHub's `generate`.

        Returns:
            As KerasHub's; an empty list for no inputs.

        Raises:
            ValueError: If a prompt has more than `max_length` tokens, or is a text and
                the model has no tokenizer.
        """
        if self.preprocessor is None:
            without_tokenizer(inputs)
        if isinstance(inputs, list | tuple | np.ndarray) and not len(inputs):
            return []
        if self.preprocessor is None and max_length is not None:
            inputs = _fit_prompts(inputs, max_length)
        return super().generate(inputs, max_length, stop_token_ids, **kwargs)


def _fit_prompts(inputs, max_length):
    """Inputs of `generate_step` whose rows of prompts have `max_length` places."""
    check_positive_int("max_length", max_length)
    if not isinstance(inputs, dict):
        raise TypeError(
            "Without a preprocessor, `max_length` needs `inputs` that are a dict of "
            f"token ids and padding mask. Received: inputs={inputs!r}"
        )
    prefix = "decoder_" if "decoder_token_ids" in inputs else ""
    names = f"{prefix}token_ids", f"{prefix}padding_mask"
    tokens, mask = (ops.convert_to_numpy(inputs[name]) for name in names)
    mask = mask.astype(bool)
    longest = int(mask.sum(1).max(initial=0))
    if longest > max_length:
        raise ValueError(
            "A prompt must fit into `max_length`. Received: a prompt of "
            f"{longest} tokens, max_length={max_length}"
        )
    order = np.argsort(~mask, axis=1, kind="stable")
    fit = []
    for x in (tokens, mask.astype("int32")):
        x = np.take_along_axis(x, order, axis=1)[:, :max_length]
        fit.append(np.pad(x, ((0, 0), (0, max_length - x.shape[1]))))
    return {**inputs, **dict(zip(names, fit, strict=True))}


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

    def get_quantization_layer_structure(self, mode):
        """That of the task."""
        task = getattr(self, self.task_argument)
        return task.get_quantization_layer_structure(mode)

    def get_config(self):
        task = keras.saving.serialize_keras_object(getattr(self, self.task_argument))
        # Otherwise the loaded task would have its own optimizer for all weights.
        task.pop("compile_config", None)
        return {**super().get_config(), self.task_argument: task}

    @classmethod
    def from_config(cls, config):
        task = keras.saving.deserialize_keras_object(config[cls.task_argument])
        return cls(**{**config, cls.task_argument: task})
