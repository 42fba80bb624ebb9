"""A cache of keys and values: the state of layers whose weights are not features."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.state import (
    RECENT,
    common_position,
    nan_beyond,
    recent_keys_spec,
    write_positions,
)


def cache_spec(batch_size, max_length, *sizes_and_dtype):
    """`state_spec` of `max_length` positions; outputs beyond them are NaN.

    Args:
        batch_size, max_length, *sizes_and_dtype: As of `recent_keys_spec`.
    """
    check_positive_int("max_length", max_length)
    return recent_keys_spec(batch_size, max_length, *sizes_and_dtype)


def extend_cache(cache, key, value, key_mask):
    """Writes the next positions to the cache.

    Args:
        cache: From `cache_spec` or an earlier call; all rows have the same position.
        key: `(batch, length, heads, key_dim)`.
        value: `(batch, length, heads, value_dim)`.
        key_mask: Boolean `(batch, length)`, or `None` for all.

    Returns:
        `(cache, key, value, mask, start)`: the new cache; all its keys and values, and
        the mask in the cache's dtype; and the position of the first new key, a scalar.
    """
    start, rows = common_position(cache["position"]), shape_of(key)[:2]
    if key_mask is None:
        key_mask = ops.ones(rows, "bool")
    extended = {"position": cache["position"] + rows[1]}
    for name, new in zip(RECENT, (key, value, key_mask), strict=True):
        old = cache[name]
        new = nan_beyond(shape_of(old)[1], start, ops.cast(new, old.dtype))
        extended[name] = write_positions(old, new, start)
    keys, values = (ops.cast(extended[name], key.dtype) for name in ("key", "value"))
    return extended, keys, values, extended["mask"], start
