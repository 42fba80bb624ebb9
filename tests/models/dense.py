"""A softmax Transformer in NumPy, float64, with the weights of a backbone."""

import numpy as np
from keras import ops

from keras_efficient_attn.models.blocks.residual import (
    PreNormResidual,
    ReorderedResidual,
    UpdateNormResidual,
)
from tests.dense import full_softmax_heads, layer_output, sigmoid


def numpy(x):
    return ops.convert_to_numpy(x).astype("float64")


def normalize(layer, x):
    if hasattr(layer, "gamma") and layer.__class__.__name__ == "LayerNormalization":
        x = x - x.mean(-1, keepdims=True)
        scale = numpy(layer.gamma)
    else:
        scale = numpy(layer.scale)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.epsilon) * scale
    return x if getattr(layer, "beta", None) is None else x + numpy(layer.beta)


def dense(layer, x):
    y = x @ numpy(layer.kernel)
    return y if layer.bias is None else y + numpy(layer.bias)


def attend(layer, x, memory, mask, causal):
    heads = full_softmax_heads
    return layer_output(layer, heads, x, memory, key_mask=mask, causal=causal)[0]


def residual(layer, x, sublayer):
    if isinstance(layer, ReorderedResidual):
        return x + np.maximum(sublayer(normalize(layer.norm, x)), 0)
    if isinstance(layer, PreNormResidual):
        return x + sublayer(normalize(layer.norm, x))
    if isinstance(layer, UpdateNormResidual):
        return x + normalize(layer.norm, sublayer(x))
    return normalize(layer.norm, x + sublayer(x))


def feed_forward(layer, x):
    activations = {"relu": lambda x: np.maximum(x, 0), "silu": lambda x: x * sigmoid(x)}
    hidden = dense(layer.hidden, x)
    hidden = activations[layer.activation.__name__](hidden)
    if layer.gated:
        hidden = hidden * dense(layer.gate, x)
    return dense(layer.output_dense, hidden)


def block(layer, x, mask, memory=None, memory_mask=None):
    x = residual(
        layer.attention_residual,
        x,
        lambda h: attend(layer.attention, h, h, mask, layer.causal),
    )
    if layer.cross_attention is not None:
        x = residual(
            layer.cross_attention_residual,
            x,
            lambda h: attend(layer.cross_attention, h, memory, memory_mask, False),
        )
    return residual(
        layer.feed_forward_residual, x, lambda h: feed_forward(layer.feed_forward, h)
    )


def stack(layer, x, mask, memory=None, memory_mask=None):
    for _ in range(layer.num_recurrences):
        for each in layer.blocks:
            x = block(each, x, mask, memory, memory_mask)
    return x if layer.final_norm is None else normalize(layer.final_norm, x)


def sinusoids(length, dim):
    """Vaswani et al., section 3.5."""
    table = np.zeros((length, dim))
    for position in range(length):
        for i in range(0, dim, 2):
            angle = position / 10_000 ** (i / dim)
            table[position, i : i + 2] = np.sin(angle), np.cos(angle)
    return table
