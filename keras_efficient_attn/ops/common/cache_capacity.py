"""What becomes of positions that a cache has no room for."""

from keras import ops


def nan_beyond(capacity, start, x):
    """`x`, or NaN if its positions reach beyond the capacity of their cache.

    A compiled program cannot raise, and a position that is dropped in silence would
    be worse.

    Args:
        capacity: Positions that the cache has room for.
        start: Position of the first, a scalar.
        x: `(batch, length, ...)`.
    """
    fits = start + ops.shape(x)[1] <= capacity
    return ops.where(fits, x, ops.cast(float("nan"), x.dtype))
