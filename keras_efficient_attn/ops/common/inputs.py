"""What local and sparse attention do with their inputs and states."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.numerics import accumulator_dtype

RECENT = ("key", "value", "mask")


def masked_inputs(query, key, value, key_mask):
    """Query, key, value, and which keys exist, in the accumulator's dtype."""
    dtype = accumulator_dtype(query, key, value)
    if key_mask is None:
        valid = ops.ones(ops.shape(key)[:2], dtype)
    else:
        kept = ops.cast(key_mask, "bool")[..., None, None]
        key, value = (ops.where(kept, t, ops.zeros_like(t)) for t in (key, value))
        valid = ops.cast(key_mask, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    return query, key, value, valid


def fitted(query, key, value, valid):
    """All as long as the longest, with zeros, and keys that do not exist, behind."""
    lengths = ops.shape(query)[1], ops.shape(key)[1]
    if all(isinstance(length, int) for length in lengths):
        length = max(lengths)
    elif keras.backend.backend() == "jax":
        # JAX exports symbolic lengths, and compares only those that are the same.
        length = lengths[0]
    else:
        length = ops.maximum(*lengths)
    query = pad_length(query, 0, length - lengths[0])
    key, value, valid = (
        pad_length(t, 0, length - lengths[1]) for t in (key, value, valid)
    )
    return query, key, value, valid


def extended(state, key, value, valid):
    """The recent keys of a state, and those of a segment behind them."""
    return tuple(
        ops.concatenate([ops.cast(state[name], new.dtype), new], axis=1)
        for name, new in zip(RECENT, (key, value, valid), strict=True)
    )


def recent_keys_spec(batch_size, reach, num_heads, key_dim, value_dim, dtype):
    """Names, shapes and dtypes of a state of the last `reach` keys."""
    rows = (batch_size, reach)
    return {
        "key": ((*rows, num_heads, key_dim), dtype),
        "value": ((*rows, num_heads, value_dim), dtype),
        "mask": (rows, dtype),
        "position": ((batch_size,), "int32"),
    }


def recent_keys(past, length, position):
    """The state after a segment, from `extended`."""
    state = {name: t[:, length:] for name, t in zip(RECENT, past, strict=True)}
    return {**state, "position": position + length}
