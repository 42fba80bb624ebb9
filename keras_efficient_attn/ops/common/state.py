"""States of streaming operations: specifications, and caches of keys."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.checks import may_agree
from keras_efficient_attn.ops.common.chunking import pad_length


def make_state(spec):
    """The tensors of a state.

    Args:
        spec: Dict of `(shape, dtype)`, for zeros, or `(shape, dtype, value)` with a
            value that broadcasts to the shape.
    """
    return {name: _fill(*entry) for name, entry in spec.items()}


def check_state(state, spec):
    """Raises `ValueError` for a state that `spec` does not describe.

    Args:
        state: Dict of tensors.
        spec: As for `make_state`, with `None` for arbitrary sizes.
    """
    expected = {name: entry[0] for name, entry in spec.items()}
    received = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if received.keys() != expected.keys() or not all(
        may_agree(received[name], shape) for name, shape in expected.items()
    ):
        raise ValueError(
            "`state` must be of the same options and sizes as the call, with the "
            f"shapes {expected}. Received: a state with the shapes {received}"
        )


def common_position(position):
    """The position `(batch,)` that all rows have; 0 for a batch without rows."""
    return ops.max(position, initial=0)


def _fill(shape, dtype, value=None):
    if value is None:
        return ops.zeros(shape, dtype)
    return ops.broadcast_to(ops.convert_to_tensor(value, dtype), shape)


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


RECENT = ("key", "value", "mask")


def recent_keys_spec(batch_size, reach, num_heads, key_dim, value_dim, dtype):
    """Names, shapes and dtypes of a state of the last `reach` keys.

    `"key"` and `"value"` are `(batch, reach, heads, dim)`, `"mask"` is `(batch, reach)`
    and 1 for keys that exist, and `"position"` `(batch,)` is the number of positions
    read.
    """
    rows = (batch_size, reach)
    return {
        "key": ((*rows, num_heads, key_dim), dtype),
        "value": ((*rows, num_heads, value_dim), dtype),
        "mask": (rows, dtype),
        "position": ((batch_size,), "int32"),
    }


def append_segment(state, *segment, names=RECENT):
    """The keys, values and masks of a state, followed by a segment's."""
    return tuple(
        ops.concatenate([ops.cast(state[name], new.dtype), new], axis=1)
        for name, new in zip(names, segment, strict=True)
    )


def drop_oldest(past, length, position):
    """The state after a segment of that length, from `append_segment`."""
    state = {name: t[:, length:] for name, t in zip(RECENT, past, strict=True)}
    return {**state, "position": position + length}


def fit_recent(state, reach):
    """The keys, values and masks of a state, cut or padded to `reach` keys."""
    excess = state["mask"].shape[1] - reach
    fit = {}
    for name in RECENT:
        t = state[name]
        fit[name] = t[:, excess:] if excess > 0 else pad_length(t, -excess, 0)
    return fit
