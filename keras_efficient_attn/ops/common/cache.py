"""Caches of a fixed capacity, one slot for each position."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of


def write_positions(cache, segment, start):
    """A cache `(batch, capacity, ...)` with a segment from position `start` on.

    Positions beyond the capacity are lost: see `nan_beyond`.

    Args:
        cache: `(batch, capacity, ...)`.
        segment: `(batch, length, ...)`, of the dtype of `cache`.
        start: Scalar.
    """
    capacity, length = shape_of(cache)[1], shape_of(segment)[1]
    if isinstance(length, int) and isinstance(capacity, int) and length > capacity:
        segment, length = segment[:, :capacity], capacity
    start = ops.minimum(start, capacity - length)
    if BACKEND != "tensorflow":
        # JAX needs indices of one dtype; where float64 is enabled, 0 is int64.
        zero = np.dtype(keras.backend.standardize_dtype(start.dtype)).type(0)
        at = (zero, start, *[zero] * (len(cache.shape) - 2))
        return ops.slice_update(cache, at, segment)
    # TensorFlow has no gradient for an updated slice.
    offset = ops.arange(capacity, dtype="int32") - start
    written = ops.logical_and(offset >= 0, offset < length)
    written = ops.reshape(written, (1, -1, *[1] * (len(cache.shape) - 2)))
    taken = ops.take(segment, ops.clip(offset, 0, length - 1), axis=1)
    return ops.where(written, taken, cache)


def nan_beyond(capacity, start, x):
    """`x`, or NaN if its positions reach beyond the capacity of their cache.

    A compiled program cannot raise, and silently dropping a position would be worse.

    Args:
        capacity: Number of positions that the cache can hold.
        start: Position of the first, a scalar.
        x: `(batch, length, ...)`.
    """
    fits = start + shape_of(x)[1] <= capacity
    return ops.where(fits, x, ops.cast(float("nan"), x.dtype))
