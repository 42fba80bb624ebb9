"""Steps shared by all forms of LSH attention."""

import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import max_along
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide

# Added to squared norms, so that a zero vector normalises to zero.
SQUARED_EPSILON = 1e-12


def unit(x):
    """`x / ‖x‖` along the last axis: the keys of these queries."""
    squared = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return x * ops.rsqrt(squared + SQUARED_EPSILON)


def masked_weights(logits, allowed, dropout_mask=None):
    """Weights of `(..., queries, keys)` logits, their totals and log scales."""
    # The exponential of minus infinity is 0, and fast.
    logits = ops.where(allowed, logits, -math.inf)
    scale = max_along(ops.stop_gradient(logits), axis=-1, initial=LOG_ZERO)
    weights = ops.exp(logits - scale[..., None])
    totals = ops.sum(weights, axis=-1)
    if dropout_mask is not None:
        weights = weights * dropout_mask
    return weights, totals, scale


def masked_part(logits, allowed, value, dropout_mask=None):
    """The part `(values, totals, log_scale)` of `(..., queries, keys)` logits."""
    weights, totals, scale = masked_weights(logits, allowed, dropout_mask)
    return weights @ value, totals, scale


def with_self(values, totals, own_value):
    """Normalises; a query that sees no other key gets its own value."""
    alone = (totals == 0.0)[..., None]
    return ops.where(alone, own_value, divide(values, totals))


def columns_of(rows, *widths):
    """Splits the last axis into `widths`."""
    start, parts = 0, []
    for width in widths:
        parts.append(rows[..., start : start + width])
        start += width
    return parts


def take_rows(table, index):
    """Rows of several tables.

    Args:
        table: `(batch, heads, length, width)`.
        index: Integers `(batch, heads, count)`.

    Returns:
        `(batch, heads, count, width)`.
    """
    batch, heads, length, width = shape_of(table)
    offset = ops.arange(batch, dtype="int32")[:, None] * heads
    offset = (offset + ops.arange(heads, dtype="int32")) * length
    flat = ops.reshape(table, (batch * heads * length, width))
    return ops.take(flat, index + offset[..., None], axis=0)
