"""Generation of KerasHub's tasks with the states of a converted backbone.

KerasHub's `generate_step` builds a cache from the prompts, and samples with it,
starting at the length of the shortest prompt, one position per step. Here that cache is
a nest of tensors, batch first: the state of each efficient layer, and for each layer
with softmax its keys and values. A state, unlike keys and values, cannot be
overwritten: prompts of different lengths are read at once, up to their last tokens, and
the sampler sees rows in which all end before the same column (`Prompts`).

Of a cache of keys and values, KerasHub's layers write one column for all rows. There,
all prompts end before one column too, after columns without tokens. Softmax layers
use differences of columns only, if at all; embeddings of positions get the position of
each row.
"""

import contextlib
import inspect

import keras_hub
from keras import ops

from keras_efficient_attn.layers.keras_internals import flat_layers
from keras_efficient_attn.models.conversion.trace import replace_call
from keras_efficient_attn.models.keras_hub_internals import (
    empty_cross_attention_cache,
    generation_methods,
    wrap_generate_step,
)
from keras_efficient_attn.models.tasks.prompts import (
    SEGMENT_LENGTHS,
    Prompts,
    stop_rows,
)
from keras_efficient_attn.ops.common.backend import shape_of

# Names of the inputs of `generate_step` that hold the prompts.
PROMPT_NAMES = ("token_ids", "padding_mask")


def generate_from_states(stock_class, methods_class):
    """Makes tasks of some backbones generate from states.

    Args:
        stock_class: A subclass of `keras_hub.models.Backbone`.
        methods_class: Called with a task and the inputs of `generate_step`; returns a
            subclass of `CausalMethods`, or `None` for KerasHub's own methods.
    """

    def run(task, stock, inputs, stop_token_ids):
        methods = methods_class(task, inputs)
        if methods is None:
            return stock(task, inputs, stop_token_ids)
        return methods(task, inputs, stop_token_ids).generate(stock)

    for task_class in list(vars(keras_hub.models).values()):
        if (
            inspect.isclass(task_class)
            and issubclass(task_class, keras_hub.models.CausalLM)
            and task_class.backbone_cls is stock_class
        ):
            wrap_generate_step(task_class, run)


def methods_of_converted(efficient_class, task, inputs):
    """The `methods_class` of `generate_from_states` for converted backbones.

    Args:
        efficient_class: Their class.
        task, inputs: As for `methods_class`.
    """
    if not isinstance(task.backbone, efficient_class):
        return None
    if isinstance(task, keras_hub.models.Seq2SeqLM):
        return Seq2SeqMethods
    if isinstance(task, keras_hub.models.Gemma3CausalLM):
        return Gemma3Methods
    return CausalMethods


class CausalMethods:
    """The methods of a `CausalLM` that build and use its cache.

    Args:
        task: A task of KerasHub with a converted backbone.
        inputs: The inputs of `generate_step`.
        stop_token_ids: Those of `generate_step`.
    """

    # Prefix of the names in `inputs` that belong to the prompts.
    prefix = ""

    def __init__(self, task, inputs, stop_token_ids=None):
        self.task, self.inputs, self.stop_token_ids = task, inputs, stop_token_ids
        tokens, mask = (inputs[self.prefix + name] for name in PROMPT_NAMES)
        self.batch_size, self.max_length = shape_of(tokens)
        self.prompts = Prompts(tokens, mask, task.sampler)
        self.position_embeddings = [
            layer
            for layer in flat_layers(task.backbone)
            if isinstance(layer, keras_hub.layers.PositionEmbedding)
        ]
        # Columns of keys: the shortest prompt gets as many tokens after the end of all.
        # Blocks make masks of this length, which only softmax layers read.
        columns = 2 * self.max_length + SEGMENT_LENGTHS[-1]
        self.capacity = columns if self.has_softmax else 1

    @property
    def sites(self):
        """The `AttentionSite`s of the layers with a cache."""
        return [s for s in self.task.backbone.attention_sites if s.is_causal]

    @property
    def has_softmax(self):
        """Whether the cache has keys and values."""
        return not all(site.is_converted for site in self.sites)

    def generate(self, stock):
        """The result of `generate_step`, computed by KerasHub's with these methods."""
        prompts, names = self.prompts, [self.prefix + name for name in PROMPT_NAMES]
        rows = dict(zip(names, (prompts.rows, prompts.mask), strict=True))
        with generation_methods(self.task, self.build_cache, self.call_with_cache):
            made = stock(self.task, {**self.inputs, **rows}, self.stop_token_ids)
        complete = prompts.complete(made[names[0]], self.stop_token_ids)
        return {**made, **dict(zip(names, complete, strict=True))}

    def build_cache(self, token_ids):
        """Implements KerasHub's `_build_cache`."""

        def read(token_ids, exists, cache, column):
            return self.call(token_ids, cache, column)[-1]

        cache = self.prompts.read(read, self.initial_cache())
        return self.hidden_states(), cache

    def call_with_cache(self, token_ids, cache, cache_update_index):
        """Implements KerasHub's `call_with_cache`."""
        column = self.column(cache_update_index)
        logits, hidden_states, cache = self.call(token_ids, cache, column)
        return self.stop_complete_rows(logits, cache, column), hidden_states, cache

    def call(self, token_ids, cache, column):
        """KerasHub's `call_with_cache` at a column of the cache."""

        def forward(stock_cache):
            return type(self.task).call_with_cache(
                self.task, token_ids, stock_cache, column
            )

        (logits, hidden_states, _), cache = self.read(forward, cache, column)
        return logits, hidden_states, cache

    def column(self, index):
        """The column of the cache that belongs to a column of the sampler's rows."""
        return index + self.prompts.end - self.prompts.index

    def stop_complete_rows(self, logits, cache, column):
        """Logits `(batch, 1, vocabulary)` after a column, for rows of full length."""
        done = column + 1 - cache["first"] >= self.max_length
        return stop_rows(logits[:, 0], done, self.stop_token_ids)[:, None]

    def hidden_states(self):
        """The prompts' hidden states, which only contrastive search uses."""
        prompts = self.prompts
        if not prompts.compares:
            return None
        names = [self.prefix + name for name in PROMPT_NAMES]
        steps = ops.arange(self.max_length, dtype="int32")
        fronts = prompts.token_ids, steps < prompts.lengths[:, None]
        outputs = self.task.backbone(
            {**self.inputs, **dict(zip(names, fronts, strict=True))}
        )
        return prompts.to_rows(self.output_of_prompts(outputs))

    def output_of_prompts(self, outputs):
        """The entry of the backbone's outputs that belongs to the prompts."""
        return outputs

    def initial_cache(self):
        """The nest of tensors before the first position."""
        return {
            # The column of each row's first token.
            "first": self.prompts.end - self.prompts.lengths,
            "layers": [self._initial_state(site) for site in self.sites],
        }

    def _initial_state(self, site):
        if site.is_converted:
            attention = site.layer.attention
            # A memory's size determines what a query sees, not the capacity.
            length = self.max_length if attention.state_grows else None
            return attention.get_initial_state(self.batch_size, length)
        geometry = site.adapter_class.geometry(site.layer)
        heads = geometry.get("num_key_value_heads") or geometry["num_heads"]
        sizes = self.batch_size, self.capacity, heads, geometry["key_dim"]
        return self.keys_and_values(*sizes, site.layer.compute_dtype)

    def keys_and_values(self, batch_size, length, heads, dim, dtype):
        """Room for the keys and values of a layer with softmax."""
        return ops.zeros((batch_size, 2, length, heads, dim), dtype)

    def unread_cache(self, batch_size):
        """A cache for KerasHub's blocks, which read only its length, for masks."""
        shape = (batch_size, self.task.backbone.num_layers, 2, self.capacity, 1, 1)
        return ops.zeros(shape, self.task.compute_dtype)

    def read(self, forward, cache, column):
        """Runs the model over the next columns.

        Args:
            forward: Called with a placeholder cache of the shape that KerasHub's blocks
                expect; returns the result of the task's method.
            cache: The nest of tensors.
            column: The first of the columns.

        Returns:
            The result of `forward`, and the next nest.
        """
        first, states = cache["first"][:, None], list(cache["layers"])
        is_token = self.is_token(first)
        with contextlib.ExitStack() as stack:
            for index, site in enumerate(self.sites):
                if site.is_converted:
                    call = self._streaming_call(site, states, index, column - first)
                else:
                    call = _caching_call(site, states, index, is_token)
                stack.enter_context(replace_call(site.layer, call))
            for layer in self.position_embeddings:
                call = self._positions_call(layer, column - first)
                stack.enter_context(replace_call(layer, call))
            result = forward(self.unread_cache(shape_of(first)[0]))
        return result, {"first": cache["first"], "layers": states}

    def is_token(self, first):
        """The mask of the cache's columns `(batch, 1, capacity)`.

        Args:
            first: The column of each row's first token, integers `(batch, 1)`.
        """
        columns = ops.arange(self.capacity, dtype="int32")
        is_token = (columns >= first) & (columns < first + self.max_length)
        return is_token[:, None]

    def _streaming_call(self, site, states, index, position):
        """The `call` of an adapter that reads a state and puts the next into a list.

        Args:
            site: The site of the adapter.
            states: List of the states of all sites.
            index: The index of this site.
            position: The position of the first column in each row, integers `(batch,
                1)`; below 0 before the first token.
        """
        adapter = site.layer

        def call(*args, cache, **kwargs):
            x = next(iter((*args, *kwargs.values())))
            positions = position + ops.arange(shape_of(x)[1], dtype="int32")
            is_token = (positions >= 0) & (positions < self.max_length)
            read = ops.maximum(position[:, 0], 0)
            output, states[index] = adapter.stream(x, states[index], read, is_token)
            return adapter.outputs_with_cache(output, cache)

        return call

    def _positions_call(self, layer, position):
        """The `call` of a `PositionEmbedding` for positions of rows, as above."""
        call = layer.call

        def call_with_positions(x, start_index=0, positions=None):
            positions = position + ops.arange(shape_of(x)[1], dtype="int32")
            return call(x, positions=ops.clip(positions, 0, layer.sequence_length - 1))

        return call_with_positions


class Gemma3Methods(CausalMethods):
    """The methods of Gemma 3 without images: its cache has pairs."""

    def build_cache(self, token_ids, *images_and_masks):
        return super().build_cache(token_ids)

    def call_with_cache(
        self, token_ids, cache, cache_update_index, cache_update_mask=None
    ):
        # The mask spares what was read of longer prompts: here, all rows write.
        return super().call_with_cache(token_ids, cache, cache_update_index)

    def keys_and_values(self, batch_size, length, heads, dim, dtype):
        zeros = ops.zeros((batch_size, length, heads, dim), dtype)
        return zeros, zeros

    def unread_cache(self, batch_size):
        dtype = self.task.compute_dtype
        pair = self.keys_and_values(batch_size, self.capacity, 1, 1, dtype)
        return (pair,) * self.task.backbone.num_layers


class Seq2SeqMethods(CausalMethods):
    """The methods of a `Seq2SeqLM`; its cross-attention has KerasHub's cache."""

    prefix = "decoder_"

    def build_cache(self, encoder_token_ids, encoder_padding_mask, decoder_token_ids):
        encoder = self.task.call_encoder(
            token_ids=encoder_token_ids, padding_mask=encoder_padding_mask
        )
        first = decoder_token_ids[:, :1]
        cross_cache = empty_cross_attention_cache(self.task, encoder_token_ids, first)

        def call(token_ids, cache, column, cross=cross_cache, cross_index=None):
            return self.call(
                cache,
                column,
                encoder_hidden_states=encoder,
                encoder_padding_mask=encoder_padding_mask,
                decoder_token_ids=token_ids,
                cross_attention_cache=cross,
                cross_attention_cache_update_index=cross_index,
            )

        *_, cross_cache = call(first, self.initial_cache(), 0, cross_cache, 0)

        def read(token_ids, exists, cache, column):
            return call(token_ids, cache, column, cross_cache)[-2]

        cache = self.prompts.read(read, self.initial_cache())
        return self.hidden_states(), encoder, cache, cross_cache

    def call_with_cache(
        self, self_attention_cache, self_attention_cache_update_index, **arguments
    ):
        """Implements KerasHub's `call_decoder_with_cache`."""
        column = self.column(self_attention_cache_update_index)
        logits, *others = self.call(self_attention_cache, column, **arguments)
        return self.stop_complete_rows(logits, self_attention_cache, column), *others

    def call(self, cache, column, **arguments):
        """KerasHub's `call_decoder_with_cache` at a column of the cache."""

        def forward(stock_cache):
            return type(self.task).call_decoder_with_cache(
                self.task,
                self_attention_cache=stock_cache,
                self_attention_cache_update_index=column,
                **arguments,
            )

        (logits, hidden_states, _, cross_cache), cache = self.read(
            forward, cache, column
        )
        return logits, hidden_states, cache, cross_cache

    def output_of_prompts(self, outputs):
        return outputs["decoder_sequence_output"]


def _caching_call(site, states, index, is_token):
    """The `call` of a layer with softmax, whose cache is a state of its own."""
    stock_call = site.layer.call

    def call(*args, cache, **kwargs):
        # T5 has a `mask`, and in its first layer only.
        for name in ("attention_mask", "mask"):
            mask = kwargs.get(name)
            if mask is not None:
                kwargs[name] = ops.where(is_token, mask, ops.zeros_like(mask))
        *outputs, states[index] = stock_call(*args, cache=states[index], **kwargs)
        return (*outputs, cache)

    return call
