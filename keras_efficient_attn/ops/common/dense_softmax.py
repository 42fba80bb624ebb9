"""Softmax attention by its definition, for the references, and its number of pairs."""

from keras import ops

from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, max_along, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide


def dense_attention(inputs, weigh):
    """`Σ f e^l v / Σ f e^l` over all keys, in the accumulator's dtype.

    Args:
        inputs: `(query, key, value, key_mask)`.
        weigh: `(query, key) -> (l, f)`: logits `(batch, heads, queries, keys)`, and
            factors that broadcast to them, booleans or floats; 0 hides a key.
    """
    query, key, value, key_mask = inputs
    dtype = accumulator_dtype(query, key, value)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    logits, factors = weigh(query, key)
    factors = ops.cast(factors, dtype)
    if key_mask is not None:
        factors = factors * ops.cast(key_mask, dtype)[:, None, None]
    logits = where(factors > 0, logits, LOG_ZERO)
    largest = max_along(logits, axis=-1, keepdims=True, initial=LOG_ZERO)
    weights = factors * ops.exp(logits - largest)
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    return divide(values, ops.swapaxes(ops.sum(weights, axis=-1), 1, 2))


def dense_products(query, key):
    """The products of all queries and keys, `(batch, heads, queries, keys)`."""
    return ops.einsum("bthd,bshd->bhts", query, key)


def count_pairs(window, length, causal):
    """Pairs of positions whose distance is less than `window`.

    Args:
        window: Integer from 0 to `length`.
        length: Positions.
        causal: Whether to exclude later keys.
    """
    earlier_or_same = window * length - window * (window - 1) // 2
    if causal or window == 0:
        return earlier_or_same
    return 2 * earlier_or_same - length
