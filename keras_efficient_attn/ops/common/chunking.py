"""Cuts sequences of any length into groups of chunks, and joins them."""

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.plan import block_sizes


def chunk_layout(length, chunk_size, batch, floats_per_position):
    """The layout of `length` positions:

    `(chunk_size, chunks per group, groups)`. A known length below `chunk_size` makes
    one chunk of that length.

    Args:
        length: Number of positions; an int, or a scalar if not known statically.
        chunk_size: Positions per chunk.
        batch: Batch size, if known.
        floats_per_position: Floats per position and row in a step.
    """
    if isinstance(length, int):
        length = max(1, length)
        chunk_size = min(chunk_size, length)
    elif BACKEND == "jax":
        # Symbolic lengths, as JAX exports them, make one group, whose chunk states
        # all exist at once.
        return chunk_size, (length + chunk_size - 1) // chunk_size, 1
    else:
        length = ops.maximum(length, 1)
    if isinstance(batch, int):
        floats_per_position *= max(1, batch)
    plan = block_sizes()
    most = plan.step_floats // (floats_per_position * chunk_size)
    most = max(1, min(most, plan.max_chunks))
    total = (length + chunk_size - 1) // chunk_size
    if isinstance(total, int):
        # Use slightly larger or smaller groups if they need no padding.
        largest = min(most * 4 // 3, plan.max_chunks, total)
        for chunks in range(largest, most // 2, -1):
            if total % chunks == 0:
                return chunk_size, chunks, total // chunks
    groups = (total + most - 1) // most
    return chunk_size, (total + groups - 1) // groups, groups


def sizes(x):
    """The shape of `x`, for a reshape that keeps the batch axis.

    The batch is -1 if only its size is unknown, so that it need not be computed.
    """
    batch, *rest = x.shape
    if None in rest:
        return shape_of(x)
    return (-1 if batch is None else batch, *rest)


def columns(x):
    """`(batch, length)` and `(batch, length, heads)` as `(batch, length, heads, 1)`."""
    return x[:, :, None, None] if len(x.shape) == 2 else x[..., None]


def by_head(x, chunk_size=None):
    """Chunks with their heads first: `(batch, heads, chunks, chunk_size, ...)`.

    Args:
        x: `(batch, group, heads, ...)`; or `(batch, chunks, chunk_size, heads, ...)`,
            without a `chunk_size`.
        chunk_size: Positions per chunk.
    """
    if chunk_size is not None:
        batch, group, *rest = sizes(x)
        x = ops.reshape(x, (batch, group // chunk_size, chunk_size, *rest))
    batch, chunks, chunk_size, heads, *tail = sizes(x)
    x = ops.transpose(x, (0, 3, 1, 2, *range(4, 4 + len(tail))))
    # Joining heads and chunks makes PyTorch copy once here, not in every matmul.
    x = ops.reshape(x, (batch, heads * chunks, chunk_size, *tail))
    return ops.reshape(x, (batch, heads, chunks, chunk_size, *tail))


def by_position(x):
    """`(batch, heads, chunks, chunk_size, ...)` as `(batch, group, heads, ...)`."""
    batch, heads, chunks, chunk_size, *tail = sizes(x)
    x = ops.transpose(x, (0, 2, 3, 1, *range(4, 4 + len(tail))))
    return ops.reshape(x, (batch, chunks * chunk_size, heads, *tail))


def chunk_count(length, chunk_size):
    """Number of chunks for `length` positions, at least one for a known length."""
    if isinstance(length, int):
        length = max(1, length)
    elif BACKEND != "jax":
        length = ops.maximum(length, 1)
    return (length + chunk_size - 1) // chunk_size


def overlapping_blocks(x, block, count, width):
    """The positions `n · block .. n · block + width` of each of `count` blocks.

    Args:
        x: `(batch, length, ...)`; padded with zeros beyond its end.
        block: Distance between the starts of consecutive blocks.
        count: Number of blocks.
        width: Positions per block, including the overlap with later blocks.

    Returns:
        `(batch, count, width, ...)`.
    """
    # Use slices, because a gather's gradient adds up row by row: one slice per block,
    # or shifted slices of whole blocks, whichever are fewer.
    shifts = -(-width // block)
    if isinstance(count, int) and count <= shifts:
        x = fit_length(x, (count - 1) * block + width)
        starts = [index * block for index in range(count)]
        return ops.stack([x[:, start : start + width] for start in starts], axis=1)
    batch, length, *tail = sizes(x)
    x = pad_length(x, 0, (count + shifts - 1) * block - length)
    pieces = []
    for shift in range(shifts):
        piece = x[:, shift * block : (shift + count) * block]
        piece = ops.reshape(piece, (batch, count, block, *tail))
        pieces.append(piece[:, :, : width - shift * block])
    return pieces[0] if shifts == 1 else ops.concatenate(pieces, axis=2)


def pad_length(x, before, after):
    """Zeros before and after along axis 1."""
    if isinstance(before, int) and isinstance(after, int) and not (before or after):
        return x
    return pad(x, [(0, 0), (before, after)] + [(0, 0)] * (len(x.shape) - 2))


def pad_to(x, length):
    """`x` padded with zeros at the end to `length` along axis 1."""
    return pad_length(x, 0, length - sizes(x)[1])


def fit_length(x, length):
    """`x` cut, or padded with zeros, to `length` along axis 1."""
    present = shape_of(x)[1]
    if isinstance(length, int) and isinstance(present, int):
        padding = max(length - present, 0)
    elif BACKEND == "jax":
        # In exports, JAX compares symbolic lengths only if they are identical.
        padding = length
    else:
        padding = ops.maximum(length - present, 0)
    return pad_length(x, 0, padding)[:, :length]


def longer_length(first, second):
    """The larger of two lengths, or their sum if they cannot be compared."""
    if isinstance(first, int) and isinstance(second, int):
        return max(first, second)
    if BACKEND == "jax":
        # As in `fit_length`.
        return first + second
    return ops.maximum(first, second)


def lower_triangle(size):
    """Boolean `(size, size)`, true on and below the diagonal."""
    positions = ops.arange(size)
    return positions[:, None] >= positions[None, :]


def by_column(x, rows, columns):
    """`(batch, length, ...)` as `(batch, columns, rows, ...)`, padded with zeros."""
    batch, length, *tail = shape_of(x)
    x = pad_length(x, 0, rows * columns - length)
    return ops.swapaxes(ops.reshape(x, (batch, rows, columns, *tail)), 1, 2)


def by_row(x):
    """`(batch, columns, rows, ...)` as `(batch, rows · columns, ...)`."""
    batch, columns, rows, *tail = shape_of(x)
    return ops.reshape(ops.swapaxes(x, 1, 2), (batch, rows * columns, *tail))
