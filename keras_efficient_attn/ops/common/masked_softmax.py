"""The quadratic definition of softmax attention under a boolean matrix."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divided


def masked_attention(inputs, allowed, scale):
    """Quadratic, from the formula.

    Args:
        inputs: `(query, key, value, key_mask)`.
        allowed: Boolean NumPy array `(heads or 1, query_length, key_length)`.
        scale: Factor of the dot products.
    """
    query, key, value, key_mask = inputs
    dtype = accumulator_dtype(query, key, value)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    allowed = ops.convert_to_tensor(np.asarray(allowed)[None])
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")
        allowed = ops.logical_and(allowed, kept[:, None, None, :])
        key, value = (ops.where(kept[..., None, None], t, 0.0) for t in (key, value))
    logits = ops.einsum("bthd,bshd->bhts", query, key) * scale
    logits = ops.where(allowed, logits, LOG_ZERO)
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    weights = ops.where(allowed, weights, 0.0)
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    totals = ops.swapaxes(ops.sum(weights, axis=-1), 1, 2)
    return divided(values, totals)
