"""What tasks have in common, and the base of models around a task."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.arguments import KeepsArguments
from keras_efficient_attn.layers.quantization import KeepsQuantization
from keras_efficient_attn.models.checkpoints.conversion import OVERRIDES
from keras_efficient_attn.models.checkpoints.tokenizer import (
    preprocessor_of,
    without_tokenizer,
    write_tokenizer,
)
from keras_efficient_attn.models.files import OptionalDocuments, PresetMixin
from keras_efficient_attn.models.tasks.prompts import (
    Prompts,
    fit_prompts,
    stop_rows,
)
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.rows import row_lengths

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
        """Writes the model in the format of transformers; as the backbone's.

        With the tokenizer, if it is from a folder in that format.
        """
        self.backbone.export_to_transformers(path, max_shard_size)
        write_tokenizer(getattr(self.preprocessor, "tokenizer", None), path)

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
        if not stack.returns_layers or stack.is_reversible:
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
        prompts = Prompts(token_ids, padding_mask, self.sampler)

        def read(segment, exists, cache, column):
            return self._read(segment, cache, exists)[1]

        cache = prompts.read(read, cache)
        if prompts.compares:
            hidden = prompts.to_rows(prompts.order.to_front(hidden_states()))
        made = self.sampler(
            next=self._next_token(shape_of(token_ids)[1], stop_token_ids),
            prompt=prompts.rows,
            cache=cache,
            index=prompts.index,
            mask=prompts.mask,
            stop_token_ids=stop_token_ids,
            hidden_states=hidden if prompts.compares else None,
            model=self,
        )
        return prompts.complete(made, stop_token_ids)

    def _next_token(self, max_length, stop_token_ids):
        """The function by which a sampler reads a token and gets the next's logits."""

        def next_token(prompt, cache, index):
            token = ops.slice(prompt, (0, index - 1), (shape_of(prompt)[0], 1))
            hidden, cache = self._read(token, cache)
            logits = self.backbone.token_embedding(hidden, reverse=True)
            # Its cache has no room for more tokens.
            done = cache["position"] >= max_length
            logits = stop_rows(logits[:, 0], done, stop_token_ids)
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
            inputs = fit_prompts(inputs, max_length)
        return super().generate(inputs, max_length, stop_token_ids, **kwargs)


class TaskWrapper(KeepsArguments, keras.Model):
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
