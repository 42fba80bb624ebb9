"""Cutting sequences of any length into groups of chunks, and back."""

from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name, shape_of
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.plan import device_plan


def chunk_layout(length, chunk_size, batch, floats_per_position):
    """How `length` positions are cut: `(chunk_size, chunks in a group, groups)`.

    A length below `chunk_size` that is known makes one chunk of its own size.

    Args:
        length: Positions; an int, or a scalar where it is not known yet.
        chunk_size: Positions in a chunk.
        batch: Rows, if known.
        floats_per_position: Floats that one position of a row takes in the step.
    """
    if isinstance(length, int):
        length = max(1, length)
        chunk_size = min(chunk_size, length)
    elif backend_name() == "jax":
        # Symbolic lengths, as JAX exports them, make one group, whose chunk states
        # all exist at once.
        return chunk_size, (length + chunk_size - 1) // chunk_size, 1
    else:
        length = ops.maximum(length, 1)
    if isinstance(batch, int):
        floats_per_position *= max(1, batch)
    plan = device_plan()
    most = plan.step_floats // (floats_per_position * chunk_size)
    most = max(1, min(most, plan.max_chunks))
    total = (length + chunk_size - 1) // chunk_size
    if isinstance(total, int):
        # Somewhat larger or smaller groups where they need no padding.
        largest = min(most * 4 // 3, plan.max_chunks, total)
        for chunks in range(largest, most // 2, -1):
            if total % chunks == 0:
                return chunk_size, chunks, total // chunks
    groups = (total + most - 1) // most
    return chunk_size, (total + groups - 1) // groups, groups


def sizes(x):
    """The shape of `x`, for a reshape that keeps the axis of the batch as it is.

    -1 for a batch of which alone the size is not known: it need not be computed.
    """
    batch, *rest = x.shape
    return (-1, *rest) if batch is None and None not in rest else shape_of(x)


def columns(x):
    """`(batch, length)` and `(batch, length, heads)` as `(batch, length, heads, 1)`."""
    return x[:, :, None, None] if len(x.shape) == 2 else x[..., None]


def by_head(x, chunk_size):
    """`(batch, group, heads, ...)` as `(batch, heads, chunks, chunk_size, ...)`."""
    batch, group, heads, *tail = sizes(x)
    return heads_first(
        ops.reshape(x, (batch, group // chunk_size, chunk_size, heads, *tail))
    )


def heads_first(x):
    """`(batch, chunks, chunk_size, heads, ...)` as `(batch, heads, chunks, ...)`."""
    batch, chunks, chunk_size, heads, *tail = sizes(x)
    x = ops.transpose(x, (0, 3, 1, 2, *range(4, 4 + len(tail))))
    # Joining heads and chunks has PyTorch copy here, once, and not in every matmul.
    x = ops.reshape(x, (batch, heads * chunks, chunk_size, *tail))
    return ops.reshape(x, (batch, heads, chunks, chunk_size, *tail))


def by_position(x):
    """`(batch, heads, chunks, chunk_size, ...)` as `(batch, group, heads, ...)`."""
    batch, heads, chunks, chunk_size, *tail = sizes(x)
    x = ops.transpose(x, (0, 2, 3, 1, *range(4, 4 + len(tail))))
    return ops.reshape(x, (batch, chunks * chunk_size, heads, *tail))


def chunk_count(length, chunk_size):
    """Chunks that hold `length` positions: one at least, where that is known."""
    if isinstance(length, int):
        length = max(1, length)
    elif backend_name() != "jax":
        length = ops.maximum(length, 1)
    return (length + chunk_size - 1) // chunk_size


def overlapping_blocks(x, block, count, width):
    """The positions `n · block .. n · block + width` of each of `count` blocks.

    Args:
        x: `(batch, length, ...)`; zeros stand for what lies behind its end.
        block: Positions from one block's start to that of the next.
        count: Number of blocks.
        width: Positions of a block with what overlaps the blocks after it.

    Returns:
        `(batch, count, width, ...)`.
    """
    # Slices, and no gather, whose gradient would add up row by row: one for each block,
    # or whole blocks, shifted by one after the other, whichever are fewer.
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
    """`x` with zeros behind it to `length`, which is no less, along axis 1."""
    return pad_length(x, 0, length - sizes(x)[1])


def fit_length(x, length):
    """`x` cut, or padded with zeros, to `length` along axis 1."""
    present = shape_of(x)[1]
    if isinstance(length, int) and isinstance(present, int):
        padding = max(length - present, 0)
    else:
        padding = ops.maximum(length - present, 0)
    return pad_length(x, 0, padding)[:, :length]


def longer_length(first, second):
    """The larger of two lengths, or their sum where they cannot be compared."""
    if isinstance(first, int) and isinstance(second, int):
        return max(first, second)
    if backend_name() == "jax":
        # JAX exports symbolic lengths, and compares only those that are the same.
        return first + second
    return ops.maximum(first, second)


def lower_triangle(size):
    """Boolean `(size, size)`, true on and below the diagonal."""
    positions = ops.arange(size)
    return positions[:, None] >= positions[None, :]
