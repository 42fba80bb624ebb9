"""Figures of a layer beside its time: useful operations, and the error of an estimate.

A multiplication and an addition are two operations. A layer counts those between its
projections (`EfficientAttention.operations`). The projections are counted here, with
`2 · inputs · outputs` per position for each: query, key, value and output, and what the
layer has of gates, decays and β, of which one of low rank is two projections. So are
short convolutions, with `2 · size` per channel. Products inside chunks, padding and
recomputation depend on the implementation and are not counted. A backward pass counts
twice the forward pass.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.keras_internals import flat_layers, own_variables

BACKWARD = 2
SAMPLED_QUERIES = 64


def layer_operations(layer, batch, length, causal):
    """Useful operations of a forward pass, or `None` for a layer without a count.

    Args:
        layer: Built `EfficientAttention`.
        batch: Batch size.
        length: Positions.
        causal: Whether query `t` sees keys `0..t` only.

    Returns:
        Number of operations, or `None`.
    """
    core = layer.operations(length, causal)
    return None if core is None else batch * (length * _projections(layer) + core)


def decode_operations(layer, batch, length):
    """Useful operations of one more position after `length` others, or `None`."""
    before, after = (layer.operations(n, True) for n in (length, length + 1))
    if before is None or after is None:
        return None
    return batch * (_projections(layer) + after - before)


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


def _projections(layer):
    """Operations of one position in projections and short convolutions."""
    kernels = [
        part.kernel
        for part in flat_layers(layer)
        if isinstance(part, keras.layers.EinsumDense)
    ]
    kernels += [
        weight
        for weight in own_variables(layer)
        if weight.name.endswith("_convolution_kernel")
    ]
    return 2 * sum(math.prod(kernel.shape) for kernel in kernels)


def _project(dense, x):
    projected = np.einsum("btd,dhk->bthk", x, _float64(dense.kernel))
    return projected if dense.bias is None else projected + _float64(dense.bias)


def _float64(x):
    x = ops.cast(ops.convert_to_tensor(x), "float32")
    return np.asarray(ops.convert_to_numpy(x), "float64")
