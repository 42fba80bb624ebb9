"""How far a layer that approximates softmax attention is from it."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers import (
    PerformerAttention,
    ReformerLSHAttention,
    VQAttention,
)
from keras_efficient_attn.layers.attention.performer.arguments import EXPONENTIAL_MAPS

SAMPLED_QUERIES = 64


def approximates_softmax(layer):
    """Whether a layer's output estimates softmax attention with the same weights.

    So do feature maps that estimate the exponential, as long as their weights are
    normalised, and codes in the place of keys, where queries and keys enter as softmax
    attention has them. Hashed attention estimates that of all pairs, of shared queries
    and keys.
    """
    if isinstance(layer, ReformerLSHAttention):
        return layer.num_local_heads == 0 and not layer.get_config()["use_gate"]
    if isinstance(layer, VQAttention):
        return (
            layer.cache
            and not layer.qk_norm
            and not layer.relative_positions
            and layer.rotary_wavelength is None
            and not layer.get_config()["use_gate"]
        )
    return (
        isinstance(layer, PerformerAttention)
        and layer.feature_map in EXPONENTIAL_MAPS
        and layer.normalize
        and not layer.qk_norm
        and layer.temperature == 1.0
        and layer.rotary_wavelength is None
        and not layer.get_config()["use_gate"]
    )


def error_against_softmax(layer, x, output, causal):
    """Relative error of an output against softmax attention, in float64.

    `‖output - softmax‖ / ‖softmax‖` over evenly spaced queries (64, the last among
    them), where softmax attention has the projections of the layer and is computed by
    NumPy.

    Args:
        layer: Built layer.
        x: Its input, `(batch, length, dim)`, as query, key and value.
        output: Its output, `(batch, length, dim)`.
        causal: Whether query `t` sees keys `0..t` only.

    Returns:
        Relative error, as a float.
    """
    x, output = _float64(x), _float64(output)
    length = x.shape[1]
    queries = np.unique(np.linspace(0, length - 1, SAMPLED_QUERIES).astype(int))
    query = _project(layer.query_dense, x[:, queries])
    key, value = _project(layer.key_dense, x), _project(layer.value_dense, x)
    hidden = causal & (np.arange(length) > queries[:, None])
    scale = layer.key_dim**-0.5
    if isinstance(layer, ReformerLSHAttention):
        key = key / np.linalg.norm(key, axis=-1, keepdims=True)
        # A position sees itself where there is nothing else.
        alone = (~hidden).sum(1, keepdims=True) == 1
        hidden |= (np.arange(length) == queries[:, None]) & ~alone
        scale = scale if layer.scale_logits else 1.0
    heads = np.empty(query.shape[:3] + value.shape[3:])
    # One head at a time: the scores of all would be large.
    for head in range(query.shape[2]):
        scores = query[:, :, head] @ np.swapaxes(key[:, :, head], 1, 2)
        scores = np.where(hidden, -np.inf, scale * scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads[:, :, head] = weights @ value[:, :, head]
    exact = np.einsum("bthd,hde->bte", heads, _float64(layer.output_dense.kernel))
    if layer.output_dense.bias is not None:
        exact += _float64(layer.output_dense.bias)
    difference = output[:, queries] - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def _project(dense, x):
    projected = np.einsum("btd,dhk->bthk", x, _float64(dense.kernel))
    return projected if dense.bias is None else projected + _float64(dense.bias)


def _float64(x):
    x = ops.cast(ops.convert_to_tensor(x), "float32")
    return np.asarray(keras.ops.convert_to_numpy(x), "float64")
