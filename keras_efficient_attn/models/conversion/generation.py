"""Generation of KerasHub's tasks with the states of a converted backbone.

KerasHub's `generate_step` builds a cache from the prompts, and samples with it,
starting at the length of the shortest prompt, one position per step. Here that cache is
a nest of tensors, batch first: the state of each efficient layer, and for each layer
with softmax its keys and values. The prompts are read only up to the position before
the first step: a state, unlike keys and values, cannot be overwritten. Tokens of longer
prompts are read at their steps; KerasHub's sampler keeps them.
"""

import contextlib
import inspect

import keras_hub
from keras import ops

from keras_efficient_attn.models.conversion.trace import replace_call
from keras_efficient_attn.models.keras_hub_internals import (
    empty_cross_attention_cache,
    generation_methods,
    wrap_generate_step,
)
from keras_efficient_attn.models.tasks.task import read_in_segments
from keras_efficient_attn.ops.common.backend import shape_of

# Lengths of the segments in which prompts are read.
SEGMENT_LENGTHS = (512, 32, 1)


def generate_from_states(stock_class, efficient_class):
    """Makes tasks with a converted backbone generate from states.

    Args:
        stock_class: A subclass of `keras_hub.models.Backbone`.
        efficient_class: The class of its converted backbones.
    """

    def make_context(task, inputs):
        if isinstance(task.backbone, efficient_class):
            return _states_as_cache(task, inputs)
        return contextlib.nullcontext()

    for task_class in list(vars(keras_hub.models).values()):
        if (
            inspect.isclass(task_class)
            and issubclass(task_class, keras_hub.models.CausalLM)
            and task_class.backbone_cls is stock_class
        ):
            wrap_generate_step(task_class, make_context)


@contextlib.contextmanager
def _states_as_cache(task, inputs):
    """Gives a task, during one `generate_step`, methods whose cache holds states."""
    if isinstance(task, keras_hub.models.Seq2SeqLM):
        methods = Seq2SeqMethods(task, inputs, "decoder_")
    elif isinstance(task, keras_hub.models.Gemma3CausalLM):
        methods = Gemma3Methods(task, inputs, "")
    else:
        methods = CausalMethods(task, inputs, "")
    with generation_methods(task, methods.build_cache, methods.call_with_cache):
        yield


class CausalMethods:
    """The methods of a `CausalLM` that build and use its cache.

    Args:
        task: A task of KerasHub with a converted backbone.
        inputs: The inputs of `generate_step`.
        prefix: Prefix of the names in `inputs` that belong to the prompts.
    """

    def __init__(self, task, inputs, prefix):
        self.task, self.inputs = task, inputs
        self.sites = [s for s in task.backbone.attention_sites if s.is_causal]
        mask = ops.cast(inputs[f"{prefix}padding_mask"], "int32")
        self.batch_size, self.max_length = shape_of(mask)
        self.shortest = ops.min(ops.sum(mask, axis=-1))
        # Prompts may begin with padding: the position of the first token.
        self.first = ops.cast(ops.argmax(mask, axis=-1), "int32")

    def build_cache(self, token_ids):
        """Implements KerasHub's `_build_cache`."""
        cache = self.read_prompts(token_ids, self.call_with_cache)
        return self.hidden_states(), cache

    def call_with_cache(self, token_ids, cache, cache_update_index):
        """Implements KerasHub's `call_with_cache`."""

        def forward(stock_cache):
            return type(self.task).call_with_cache(
                self.task, token_ids, stock_cache, cache_update_index
            )

        (logits, hidden_states, _), cache = self.read(
            forward, cache, cache_update_index
        )
        return logits, hidden_states, cache

    def hidden_states(self):
        """The prompts' hidden states, which only contrastive search uses."""
        if not isinstance(self.task.sampler, keras_hub.samplers.ContrastiveSampler):
            return None
        return self.task.backbone(self.inputs)

    def initial_cache(self):
        """The nest of tensors before the first position."""
        return {
            "first": self.first,
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
        sizes = self.batch_size, self.max_length, heads, geometry["key_dim"]
        return self.keys_and_values(*sizes, site.layer.compute_dtype)

    def keys_and_values(self, batch_size, length, heads, dim, dtype):
        """Room for the keys and values of a layer with softmax."""
        return ops.zeros((batch_size, 2, length, heads, dim), dtype)

    def unread_cache(self, batch_size, capacity):
        """A cache for KerasHub's blocks, which read only its length, for masks."""
        shape = (batch_size, self.task.backbone.num_layers, 2, capacity, 1, 1)
        return ops.zeros(shape, self.task.compute_dtype)

    def read_prompts(self, token_ids, call):
        """The cache after all positions before the first step's position.

        Args:
            token_ids: Integers `(batch, max_length)`.
            call: Called with tokens, a cache and a position; returns a tuple that ends
                with the next cache.
        """

        def read(segment, cache, position):
            return call(segment, cache, position)[-1]

        count = self.shortest - 1
        return read_in_segments(
            read, token_ids, self.initial_cache(), count, SEGMENT_LENGTHS
        )

    def read(self, forward, cache, position):
        """Runs the model over the next positions.

        Args:
            forward: Called with a placeholder cache of the shape that KerasHub's blocks
                expect; returns the result of the task's method.
            cache: The nest of tensors.
            position: The first of the positions.

        Returns:
            The result of `forward`, and the next nest.
        """
        states = list(cache["layers"])
        kept = not all(site.is_converted for site in self.sites)
        # Blocks make masks of this length, which only softmax layers read.
        capacity = self.max_length if kept else 1
        batch_size = shape_of(cache["first"])[0]
        steps = ops.arange(self.max_length, dtype="int32")
        is_token = (steps >= cache["first"][:, None])[:, None]
        with contextlib.ExitStack() as stack:
            for index, site in enumerate(self.sites):
                if site.is_converted:
                    call = _streaming_call(
                        site, states, index, position, cache["first"]
                    )
                else:
                    call = _caching_call(site, states, index, is_token)
                stack.enter_context(replace_call(site.layer, call))
            result = forward(self.unread_cache(batch_size, capacity))
        return result, {"first": cache["first"], "layers": states}


class Gemma3Methods(CausalMethods):
    """The methods of Gemma 3 without images: its cache has pairs."""

    def build_cache(self, token_ids, *images_and_masks):
        return super().build_cache(token_ids)

    def call_with_cache(
        self, token_ids, cache, cache_update_index, cache_update_mask=None
    ):
        # The mask spares what was read of longer prompts: here, nothing was.
        return super().call_with_cache(token_ids, cache, cache_update_index)

    def keys_and_values(self, batch_size, length, heads, dim, dtype):
        zeros = ops.zeros((batch_size, length, heads, dim), dtype)
        return zeros, zeros

    def unread_cache(self, batch_size, capacity):
        dtype = self.task.compute_dtype
        pair = self.keys_and_values(batch_size, capacity, 1, 1, dtype)
        return (pair,) * self.task.backbone.num_layers


class Seq2SeqMethods(CausalMethods):
    """The methods of a `Seq2SeqLM`; its cross-attention has KerasHub's cache."""

    def build_cache(self, encoder_token_ids, encoder_padding_mask, decoder_token_ids):
        encoder = self.task.call_encoder(
            token_ids=encoder_token_ids, padding_mask=encoder_padding_mask
        )
        first = decoder_token_ids[:, :1]
        cross_cache = empty_cross_attention_cache(self.task, encoder_token_ids, first)

        def call(token_ids, cache, position, cross=cross_cache, cross_index=None):
            return self.call_with_cache(
                encoder_hidden_states=encoder,
                encoder_padding_mask=encoder_padding_mask,
                decoder_token_ids=token_ids,
                self_attention_cache=cache,
                self_attention_cache_update_index=position,
                cross_attention_cache=cross,
                cross_attention_cache_update_index=cross_index,
            )

        *_, cross_cache = call(first, self.initial_cache(), 0, cross_cache, 0)

        def read(token_ids, cache, position):
            return call(token_ids, cache, position, cross_cache)[:-1]

        cache = self.read_prompts(decoder_token_ids, read)
        return self.hidden_states(), encoder, cache, cross_cache

    def call_with_cache(
        self, self_attention_cache, self_attention_cache_update_index, **arguments
    ):
        """Implements KerasHub's `call_decoder_with_cache`."""
        position = self_attention_cache_update_index

        def forward(stock_cache):
            return type(self.task).call_decoder_with_cache(
                self.task,
                self_attention_cache=stock_cache,
                self_attention_cache_update_index=position,
                **arguments,
            )

        (logits, hidden_states, _, cross_cache), cache = self.read(
            forward, self_attention_cache, position
        )
        return logits, hidden_states, cache, cross_cache

    def hidden_states(self):
        hidden_states = super().hidden_states()
        if hidden_states is None:
            return None
        return hidden_states["decoder_sequence_output"]


def _streaming_call(site, states, index, position, first):
    """The `call` of an adapter that reads a state and puts the next into a list."""
    adapter = site.layer

    def call(*args, cache, **kwargs):
        x = next(iter((*args, *kwargs.values())))
        steps = position + ops.arange(shape_of(x)[1], dtype="int32")
        is_token = steps >= first[:, None]
        read = ops.maximum(position - first, 0)
        output, states[index] = adapter.stream(x, states[index], read, is_token)
        return adapter.outputs_with_cache(output, cache)

    return call


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
