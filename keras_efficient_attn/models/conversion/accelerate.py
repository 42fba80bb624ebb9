"""Runs models that already have linear attention on this package's operations."""

import contextlib
import functools

import keras_hub
from keras import ops

from keras_efficient_attn.layers.keras_internals import flat_layers
from keras_efficient_attn.models.conversion.generation import (
    CausalMethods,
    generate_from_states,
)
from keras_efficient_attn.models.conversion.trace import replace_call
from keras_efficient_attn.models.keras_hub_internals import (
    gated_delta_net_with,
    gated_delta_nets,
    softmax_layers_beside_delta,
)
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.linear_attention.api import linear_attention

# Epsilon that KerasHub adds to squared norms.
EPSILON = 1e-6


def accelerate(model):
    """Makes a model compute its gated delta rule with `ops.linear_attention`.

    Weights, outputs and saved files do not change. The rule loops over chunks for any
    length; KerasHub unrolls each chunk and 63 steps of an inverse, so compiling here
    takes a fraction of the time. The rule also applies the padding mask: a masked
    position neither decays nor writes the state, so that padding does not change the
    state after a prompt.

    `generate` of a task reads prompts of different lengths, padded anywhere, at once,
    and gives the tokens of whole calls on each prompt alone; KerasHub's own reads the
    last token of a prompt into the state twice. With images, KerasHub's own runs.

    Args:
        model: A KerasHub backbone of Qwen 3.5, or a task with one; its layers are
            changed in place. Functions that Keras has already compiled do not change.

    Returns:
        The model.

    Raises:
        ValueError: If no layer of the model computes a gated delta rule.

    Example:

    >>> import keras_hub
    >>> from keras_efficient_attn import models
    >>> backbone = keras_hub.models.Qwen3_5Backbone(
    ...     vocabulary_size=50, num_layers=2, num_query_heads=2,
    ...     num_key_value_heads=1, head_dim=8, hidden_dim=16, intermediate_dim=24,
    ...     linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
    ...     linear_value_head_dim=8,
    ... )
    >>> backbone = models.accelerate(backbone)

    Reference:
        - [Yang et al., 2024](https://arxiv.org/abs/2412.06464)
    """
    layers = gated_delta_nets(model)
    if not layers:
        raise ValueError(
            "`model` must have layers with a gated delta rule, as Qwen 3.5 of KerasHub "
            f"has. Received: {type(model).__name__}"
        )
    for layer in layers:
        layer.__class__ = gated_delta_net_with(_gated_delta_rule)
    for part in flat_layers(model):
        if isinstance(part, keras_hub.models.Backbone):
            _generate_from_states(type(part))
    return model


@functools.cache
def _generate_from_states(backbone_class):
    generate_from_states(backbone_class, _methods)


def _methods(task, inputs):
    accelerated = gated_delta_net_with(_gated_delta_rule)
    nets = gated_delta_nets(task.backbone)
    has_images = inputs.get("pixel_values") is not None
    if has_images or not all(isinstance(net, accelerated) for net in nets):
        return None
    return _DeltaMethods


class _DeltaMethods(CausalMethods):
    """The methods of Qwen 3.5, whose cache is KerasHub's.

    Padding lies before the first token only, where the state is zero: inputs of zeros
    leave it so.
    """

    has_softmax = True

    def build_cache(self, token_ids, padding_mask, **images):
        return super().build_cache(token_ids)

    def call_with_cache(self, token_ids, cache, cache_update_index, padding_mask=None):
        return super().call_with_cache(token_ids, cache, cache_update_index)

    def initial_cache(self):
        backbone = self.task.backbone
        rows = self.batch_size, backbone.num_layers
        keys = backbone.linear_num_key_heads * backbone.linear_key_head_dim
        sizes = backbone.linear_key_head_dim, backbone.linear_value_head_dim
        heads = backbone.linear_num_value_heads
        channels = 2 * keys + heads * sizes[1]
        columns = self.capacity, backbone.num_key_value_heads, backbone.head_dim
        dtype = self.task.compute_dtype
        return {
            "first": self.prompts.end - self.prompts.lengths,
            "layers": (
                ops.zeros((*rows, 2, *columns), dtype),
                ops.zeros(
                    (*rows, channels, backbone.linear_conv_kernel_dim - 1), dtype
                ),
                ops.zeros((*rows, heads, *sizes), "float32"),
            ),
        }

    def read(self, forward, cache, column):
        first = cache["first"][:, None]
        is_token = self.is_token(first)
        backbone = self.task.backbone
        with contextlib.ExitStack() as stack:
            for net in gated_delta_nets(backbone):
                call = _call_with_zeros(net, column - first)
                stack.enter_context(replace_call(net, call))
            for layer in softmax_layers_beside_delta(backbone):
                call = _call_with_mask(layer, is_token)
                stack.enter_context(replace_call(layer, call))
            result = forward(cache["layers"])
        return result, {"first": cache["first"], "layers": result[-1]}


def _call_with_zeros(net, position):
    """The `call` of a net for inputs that are zero before each row's first token."""
    call = net.call

    def call_with_zeros(x, **kwargs):
        positions = position + ops.arange(shape_of(x)[1], dtype="int32")
        return call(x * ops.cast(positions >= 0, x.dtype)[..., None], **kwargs)

    return call_with_zeros


def _call_with_mask(layer, is_token):
    """The `call` of a softmax layer that sees keys of tokens only."""
    call = layer.call

    def call_with_mask(*args, attention_mask, **kwargs):
        mask = ops.where(is_token, attention_mask, ops.zeros_like(attention_mask))
        return call(*args, attention_mask=mask, **kwargs)

    return call_with_mask


def _gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    padding_mask=None,
):
    """KerasHub's rule, as its layers call it: `(output, state or None)`."""
    state = None
    if output_final_state or initial_state is not None:
        batch, _, heads, dim = ops.shape(key)
        if initial_state is None:
            shape = (batch, heads, dim, ops.shape(value)[-1])
            initial_state = ops.zeros(shape, "float32")
        state = {
            "sum": ops.cast(initial_state, "float32"),
            "normalizer": ops.zeros((batch, heads, dim), "float32"),
            "log_scale": ops.zeros((batch, heads), "float32"),
        }
    output = linear_attention(
        _unit(query) * query.shape[-1] ** -0.5,
        _unit(key),
        value,
        log_decay=g,
        beta=beta,
        key_mask=padding_mask,
        causal=True,
        state=state,
        normalize=False,
    )
    if state is None:
        return output, None
    output, state = output
    return output, state["sum"] if output_final_state else None


def _unit(x):
    x = ops.cast(x, "float32")
    return x * ops.rsqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + EPSILON)
