"""Useful operations of a layer: the one place where they are counted.

A multiplication and an addition are two operations. Counted are the matrix products
that the definition needs, for self-attention over `length` positions:

- projections: `8 · dim · width` per position (query, key, value and output), where
  `width` is heads times head size;
- softmax: `4 · width` per pair of a query and a key that it sees;
- linear attention with `m` features per head: `4 · m · width` per position (adding to
  the state and reading it), and `4 · rows · width` where a random projection with that
  many rows makes the features; with a `window`, `4 · width` per exact pair.

Not counted is what an implementation adds: products inside chunks, padding,
recomputation. A backward pass counts twice the forward pass.
"""

import keras

from keras_efficient_attn.layers import PerformerAttention, SoftmaxAttention

BACKWARD = 2


def layer_operations(layer, batch, length, causal):
    """Useful operations of a forward pass, or `None` for a layer without a count.

    Args:
        layer: Built attention layer.
        batch: Rows.
        length: Positions.
        causal: Whether query `t` sees keys `0..t` only.

    Returns:
        Number of operations, or `None`.
    """
    core = _core(layer, length, causal)
    return None if core is None else batch * (length * _projections(layer) + core)


def decode_operations(layer, batch, length):
    """Useful operations of one more position after `length` others, or `None`."""
    before, after = (_core(layer, n, True) for n in (length, length + 1))
    if before is None:
        return None
    return batch * (_projections(layer) + after - before)


def _projections(layer):
    return 2 * sum(
        kernel.shape[0] * kernel.shape[1] * kernel.shape[2]
        for kernel in (
            layer.query_dense.kernel,
            layer.key_dense.kernel,
            layer.value_dense.kernel,
            layer.output_dense.kernel,
        )
    )


def _core(layer, length, causal):
    """Operations between the projections, for one row."""
    heads, key_dim, value_dim = layer.num_heads, layer.key_dim, layer.value_dim
    config = layer.get_config()
    if config["use_gate"] or config.get("sliding_window") is not None:
        return None
    per_pair = 2 * heads * (key_dim + value_dim)
    if type(layer) in (keras.layers.MultiHeadAttention, SoftmaxAttention):
        return per_pair * _pairs(length, length, causal)
    if isinstance(layer, PerformerAttention):
        features = 4 * heads * key_dim * _projection_rows(layer)
        sums = 4 * heads * value_dim * layer.feature_dim
        window = 0 if layer.window is None else min(layer.window, length)
        return (features + sums) * length + per_pair * _pairs(window, length, causal)
    return None


def _pairs(window, length, causal):
    """Pairs whose distance is less than `window`, later keys apart if causal."""
    earlier_or_same = window * length - window * (window - 1) // 2
    if causal or window == 0:
        return earlier_or_same
    return 2 * earlier_or_same - length


def _projection_rows(layer):
    for weight in layer.non_trainable_weights:
        if weight.name == "projection":
            return weight.shape[0]
    return 0
