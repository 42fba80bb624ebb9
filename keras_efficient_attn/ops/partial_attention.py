"""Attention in parts: numerators and log scales that add up to one softmax.

A part of the keys gives, for each query, `numerator = Σ w·[v, 1] / e^s` and the log
scale `s`. The column of ones carries the denominator, so that masks and gradients
cannot treat the two differently. Parts are brought to a common scale, added, and
divided once.
"""

import keras
from keras import ops

# Stands for minus infinity as a log weight: its exponential is 0, and unlike
# infinity it leaves differences between two of itself at 0 instead of NaN.
LOG_ZERO = -1e30


def accumulator_dtype(*tensors):
    """float32, or float64 where one of the tensors is."""
    dtypes = {keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors}
    return "float64" if "float64" in dtypes else "float32"


def larger(first, second):
    """The elementwise maximum. `ops.maximum` turns float64 to float32 on PyTorch."""
    return ops.where(first > second, first, second)


def smallest_denominator(dtype):
    """Denominators below this count as zero: their reciprocals near the float range."""
    return 1e-290 if keras.backend.standardize_dtype(dtype) == "float64" else 1e-30


def with_ones(value, valid):
    """`[value, 1]` along the last axis, the one being 0 for keys that are not valid.

    `valid` has the axes of `value` without the last, or sizes of 1 there.
    """
    ones = ops.broadcast_to(valid[..., None], (*ops.shape(value)[:-1], 1))
    return ops.concatenate([value, ones], axis=-1)


def bounded_log_weight(log_weight, key_mask=None):
    """`log_weight` with `LOG_ZERO` for −inf and for the keys that a mask hides."""
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")[..., None]
        log_weight = ops.where(kept, log_weight, LOG_ZERO)
    return ops.where(log_weight > LOG_ZERO, log_weight, LOG_ZERO)


def finish(numerator, log_scale=None, normalize=True):
    """The output of a `(..., value_dim + 1)` numerator: `(..., value_dim)`.

    Normalised, a row whose denominator is zero (no key to see) is zero.
    """
    values, total = numerator[..., :-1], numerator[..., -1:]
    if not normalize:
        return values if log_scale is None else values * ops.exp(log_scale)[..., None]
    seen = ops.abs(total) > smallest_denominator(total.dtype)
    # Both are first divided by the constant that makes the denominator 1: its square,
    # which the derivative of a quotient divides by, would leave the float range.
    scale = ops.stop_gradient(ops.where(seen, 1.0 / ops.where(seen, total, 1.0), 0.0))
    return (values * scale) / ops.where(seen, total * scale, 1.0)


def merge(parts):
    """One `(numerator, log_scale)` from several over disjoint sets of keys.

    A part that saw no key has to have the numerator 0; its scale is then free.
    """
    numerators, scales = zip(*parts, strict=True)
    largest = ops.stop_gradient(ops.max(ops.stack(scales), axis=0))
    merged = sum(
        numerator * ops.exp(scale - largest)[..., None] for numerator, scale in parts
    )
    return merged, largest
