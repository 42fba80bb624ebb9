"""A cache of keys and values: the state of layers whose weights are not features."""

from keras import ops

from keras_efficient_attn.ops.common.cache import nan_beyond, write_positions
from keras_efficient_attn.ops.common.checks import check_positive_int


def cache_spec(batch_size, max_length, tails, dtype):
    """`state_spec` of a cache.

    Args:
        batch_size: Rows in the batch.
        max_length: Positions that the cache can hold; those beyond are NaN.
        tails: Dict of names and the shapes of one position's tensors.
        dtype: Dtype of these tensors.

    Returns:
        Dict of the names, `(batch, max_length, *tail)`, and `position`, the number of
        positions read, `(batch,)`.
    """
    check_positive_int("max_length", max_length)
    spec = {
        name: ((batch_size, max_length, *tail), dtype) for name, tail in tails.items()
    }
    return {**spec, "position": ((batch_size,), "int32")}


def extend_cache(cache, new):
    """Writes the next positions.

    Args:
        cache: From `cache_spec` or an earlier call; all rows have the same position.
        new: Dict of tensors `(batch, length, *tail)`.

    Returns:
        `(cache, start)`: the cache after them, and the position of the first, a scalar.
    """
    start = cache["position"][0]
    length = ops.shape(next(iter(new.values())))[1]
    extended = {name: _write(cache[name], start, x) for name, x in new.items()}
    return {**extended, "position": cache["position"] + length}, start


def _write(old, start, new):
    new = nan_beyond(ops.shape(old)[1], start, ops.cast(new, old.dtype))
    return write_positions(old, new, start)
