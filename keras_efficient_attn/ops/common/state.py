"""States of streaming operations: specifications, and caches of keys."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import may_agree
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.numerics import write_rows
from keras_efficient_attn.ops.common.rows import take_rows


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
            "`state` must come from calls with the same options and sizes, with the "
            f"shapes {expected}. Received: a state with the shapes {received}"
        )


def _fill(shape, dtype, value=None):
    if value is None:
        return ops.zeros(shape, dtype)
    return ops.broadcast_to(ops.convert_to_tensor(value, dtype), shape)


def write_positions(caches, segments, start, lengths=None):
    """Caches with a segment from position `start` on.

    Rows that read beyond the capacity are lost: see `nan_beyond`.

    Args:
        caches: Tensors `(batch, capacity, ...)`.
        segments: Tensors `(batch, length, ...)`, of the dtypes of `caches`.
        start: Integers `(batch,)`.
        lengths: Integers `(batch,)`: the positions of each row that exist, at its
            beginning. Defaults to `None`: all.

    Returns:
        A list of the new caches.
    """
    batch, capacity = shape_of(caches[0])[:2]
    length = shape_of(segments[0])[1]
    if isinstance(length, int) and isinstance(capacity, int) and length > capacity:
        segments, length = [x[:, :capacity] for x in segments], capacity
    step = ops.arange(length, dtype="int32")
    slot = start[:, None] + step
    if lengths is None:
        # A row beyond the capacity is lost, whatever it replaces.
        slot = ops.minimum(slot, capacity - 1)
    else:
        written = ops.logical_and(slot < capacity, step < lengths[:, None])
        # The slots of a row differ.
        slot = slot % capacity
    row = ops.arange(batch, dtype="int32")[:, None]
    index = ops.reshape(slot + capacity * row, (-1,))
    before = segments if lengths is None else take_rows(slot, *caches)
    new = []
    for cache, segment, old in zip(caches, segments, before, strict=True):
        tail = shape_of(cache)[2:]
        if lengths is not None:
            kept = ops.reshape(written, (batch, length, *[1] * len(tail)))
            segment = ops.where(kept, segment, old)
        flat = ops.reshape(cache, (batch * capacity, *tail))
        segment = ops.reshape(segment, (batch * length, *tail))
        flat = write_rows(flat, index, segment)
        new.append(ops.reshape(flat, (batch, capacity, *tail)))
    return new


def nan_beyond(capacity, position, x):
    """`x`, NaN in rows that have read more positions than their cache holds.

    A compiled program cannot raise, and silently dropping a position would be worse.

    Args:
        capacity: Number of positions that the cache can hold.
        position: Positions read, those of `x` included: integers `(batch,)`.
        x: `(batch, length, ...)`.
    """
    fits = ops.reshape(position <= capacity, (-1, *[1] * (len(x.shape) - 1)))
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


def keep_last(past, length, lengths=None):
    """The last positions that exist, as many as there were before a segment.

    Args:
        past: `(batch, reach + length, ...)`: `reach` positions and a segment.
        length: Length of the segment.
        lengths: Integers `(batch,)`: the positions of the segment that exist in each
            row, at its beginning. Defaults to `None`: all.
    """
    if lengths is None:
        return past[:, length:]
    reach = shape_of(past)[1] - length
    index = lengths[:, None] + ops.arange(reach, dtype="int32")
    return take_rows(index, past)[0]


def drop_oldest(past, length, position, lengths=None):
    """The state after a segment, from `append_segment`.

    Args:
        past: The keys, values and masks of the state and the segment.
        length, lengths: As for `keep_last`.
        position: Integers `(batch,)`, before the segment.
    """
    state = {
        name: keep_last(t, length, lengths)
        for name, t in zip(RECENT, past, strict=True)
    }
    return {**state, "position": position + (length if lengths is None else lengths)}


def fit_recent(state, reach):
    """The keys, values and masks of a state, cut or padded to `reach` keys."""
    excess = state["mask"].shape[1] - reach
    fit = {}
    for name in RECENT:
        t = state[name]
        fit[name] = t[:, excess:] if excess > 0 else pad_length(t, -excess, 0)
    return fit
