"""Error of a layer that approximates softmax attention."""

import keras
import numpy as np
from keras import ops

SAMPLED_QUERIES = 64


def error_against_softmax(layer, x, output, causal):
    """Relative error of an output against softmax attention, in float64.

    `‖output - softmax‖ / ‖softmax‖` over 64 evenly spaced queries, including the last.
    NumPy computes softmax attention with the layer's projections.

    Args:
        layer: Built layer.
        x: The layer's input `(batch, length, dim)`, used as query, key and value.
        output: The layer's output, `(batch, length, dim)`.
        causal: Whether query `t` sees keys `0..t` only.

    Returns:
        Relative error, as a float.
    """
    x, output = _float64(x), _float64(output)
    length = x.shape[1]
    queries = np.unique(np.linspace(0, length - 1, SAMPLED_QUERIES).astype(int))
    query = _project(layer.query_dense, x[:, queries])
    key, value = _project(layer.key_dense, x), _project(layer.value_dense, x)
    heads = np.empty(query.shape[:3] + value.shape[3:])
    # One head at a time: the scores of all heads would be large.
    group = query.shape[2] // key.shape[2]
    for head in range(query.shape[2]):
        own = head // group
        logits = layer.softmax_logits(
            query[:, :, head], key[:, :, own], queries, causal
        )
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        heads[:, :, head] = weights @ value[:, :, own]
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
