"""Attention in parts: sums and log scales that combine to one softmax.

A part of the keys gives, for each query, `values = Σ w v / e^s`, `totals = Σ w / e^s`
and the log scale `s`. Parts are brought to a common scale, added, and divided once.
"""

import functools
import operator

import keras
from keras import ops

from keras_efficient_attn.ops.common.numerics import max_along, where

# Replaces minus infinity as a log weight: its exponential is 0, and the difference of
# two is 0 instead of NaN.
LOG_ZERO = -1e30


def bounded_log_weight(log_weight, key_mask=None):
    """`log_weight` with `LOG_ZERO` for −inf and for the keys that a mask hides."""
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")[..., None]
        log_weight = where(kept, log_weight, LOG_ZERO)
    return where(log_weight > LOG_ZERO, log_weight, LOG_ZERO)


def sum_of_scales(first, second):
    """The sum of two log scales or weights; `None` counts as 0."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def reciprocal(totals):
    """`1 / totals`, or 0 for a total that counts as zero (no visible key)."""
    wide = keras.backend.standardize_dtype(totals.dtype) == "float64"
    # Anything but 0, except subnormal numbers, whose reciprocal may be infinite.
    seen = ops.abs(totals) > (2.3e-308 if wide else 1.2e-38)
    return ops.where(seen, 1.0 / ops.where(seen, totals, 1.0), 0.0)


def divide(values, totals):
    """`values / totals` for `(..., value_dim)` and `(...)`; 0 without visible keys."""
    # First divide both by the constant that makes the total 1. The derivative of a
    # quotient divides by the square of the total, which would leave the float range.
    scale = ops.stop_gradient(reciprocal(totals))
    totals = ops.where(scale == 0.0, 1.0, totals * scale)
    return (values * scale[..., None]) / totals[..., None]


def finish(values, totals, log_scale, normalize):
    """The output of a part, or of all parts merged: `(..., value_dim)`."""
    if normalize:
        return divide(values, totals)
    return values * ops.exp(log_scale)[..., None]


def merge(parts):
    """Merges several `(values, totals, log_scale)` over disjoint sets of keys.

    A part without visible keys must have sums of 0; its scale is then arbitrary.
    """
    _, _, scales = zip(*parts, strict=True)
    largest = ops.stop_gradient(max_along(ops.stack(scales), axis=0))
    weights = [ops.exp(scale - largest) for scale in scales]
    weighted = [
        (w[..., None] * values, w * totals)
        for w, (values, totals, _) in zip(weights, parts, strict=True)
    ]
    values, totals = (
        functools.reduce(operator.add, terms) for terms in zip(*weighted, strict=True)
    )
    return values, totals, largest
