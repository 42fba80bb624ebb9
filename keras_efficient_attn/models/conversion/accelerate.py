"""Runs models that already have linear attention on this package's operations."""

from keras import ops

from keras_efficient_attn.models.keras_hub_internals import (
    gated_delta_net_with,
    gated_delta_nets,
)
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
    return model


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
