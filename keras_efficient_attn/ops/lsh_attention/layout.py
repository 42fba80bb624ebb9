"""The slot of each position after sorting buckets and cutting them into chunks."""

import collections
import dataclasses
import math

from keras import ops

from keras_efficient_attn.ops.common.backend import are_values_known, shape_of
from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_number,
    check_positive_int,
)
from keras_efficient_attn.ops.common.chunking import chunk_layout
from keras_efficient_attn.ops.common.numerics import greatest_index, pad
from keras_efficient_attn.ops.common.rows import running_count

# Positions and codes are stored in float32 tensors, which are exact up to here.
MAX_CODE = 2**24

Chunks = collections.namedtuple(
    "Chunks", ["order", "starts", "first", "number", "slot", "code", "before"]
)
Chunks.__doc__ = """Sorted positions, cut into chunks.

Attributes:
    order: `(batch, heads, rounds, length)`, positions in their sorted order.
    starts: `(batch, heads, rounds, groups + 1)`, where in that order a group starts:
        a bucket if chunks are aligned, or all buckets.
    first: `(batch, heads, rounds, groups)`, the first chunk of a group.
    number: `(batch, heads, rounds, groups)`, chunks of a group.
    slot: `(batch, heads, rounds, length)`, the slot of a position; 0 if it is hidden.
    code: `(batch, heads, rounds, length)`, a number for the part of a chunk that a
        position is in, and sees; -1 if it is hidden.
    before: The code of the part of the chunk before that a position sees too; none has
        the code where there is none.
"""

Layout = collections.namedtuple(
    "Layout", ["token", "last_token", "chunks_in_tile", "tiles"]
)
Layout.__doc__ = """The positions in the slots of chunks.

Attributes:
    token: `(batch, heads, rounds, slots)`, the position in a slot; the last position
        where a slot is empty.
    last_token: `(batch, heads, rounds, chunk_size)`, of the last chunk with any.
    chunks_in_tile: Chunks that are computed at once.
    tiles: How often.
"""


def cut_into_chunks(buckets, kept, config):
    """Sorts positions by bucket, and cuts them into `Chunks`.

    Args:
        buckets: Integers `(batch, heads, rounds, length)`, below the number of buckets.
        kept: Boolean `(batch, length)`; the others are hidden: they are in a separate
            last bucket, which is dropped.
        config: `LSHConfig`. If `aligned`, no position's chunk depends on later
            positions. Otherwise chunks cross bucket boundaries; with `across_buckets`,
            the last chunk precedes the first.
    """
    num_buckets, aligned = config.num_buckets, config.aligned
    length, chunk_size = shape_of(buckets)[-1], config.chunk_size
    kept = kept[:, None, None, :]
    bucket = ops.where(kept, buckets, num_buckets)
    # Unique sort keys, centred at zero to use all 32 bits.
    position = ops.arange(length, dtype="int32")
    order = ops.argsort((bucket - num_buckets // 2) * length + position, axis=-1)
    rank = ops.argsort(order, axis=-1)

    groups = num_buckets if aligned else 1
    group = bucket if aligned else ops.where(kept, ops.zeros_like(bucket), 1)
    starts = _count_below(
        ops.take_along_axis(group, order, axis=-1),
        ops.arange(groups + 1, dtype="int32"),
    )
    number = (starts[..., 1:] - starts[..., :-1] + chunk_size - 1) // chunk_size
    first = ops.cast(ops.cumsum(number, axis=-1), "int32") - number

    own = ops.where(kept, group, 0)
    within = rank - ops.take_along_axis(starts, own, axis=-1)
    chunk = within // chunk_size
    start = ops.take_along_axis(first, own, axis=-1)
    slot = start * chunk_size + within
    code = start + chunk + 1
    if not config.across_buckets:
        # A code for each bucket's part of a chunk. Between two buckets is an unused
        # code, which precedes a bucket's first part.
        code = code + 2 * bucket
    before = code - 1
    if config.across_buckets:
        wraps = ops.logical_and(chunk == 0, number > 1)
        before = ops.where(wraps, number, before)
    return Chunks(
        order=order,
        starts=starts,
        first=first,
        number=number,
        slot=ops.where(kept, slot, 0),
        code=ops.where(kept, code, -1),
        before=ops.where(kept, before, -2),
    )


def codes_by_document(buckets, kept, config, documents):
    """The `code` and `before` of `Chunks`, for chunks of each document by itself.

    Args:
        buckets, kept, config: As for `cut_into_chunks`.
        documents: `Documents`.
    """
    length, chunk_size = shape_of(buckets)[-1], config.chunk_size
    kept = kept[:, None, None]
    bucket = ops.where(kept, buckets, config.num_buckets)
    number, position, later = (
        ops.broadcast_to(x[:, None, None], shape_of(bucket)) for x in documents
    )
    # Hidden positions come last.
    number = ops.where(kept, number, length + 2)
    steps = ops.arange(length, dtype="int32")
    order = ops.argsort((bucket - config.num_buckets // 2) * length + steps, axis=-1)
    # Sorting is stable: by document, then by bucket, then by position.
    by_number = ops.argsort(ops.take_along_axis(number, order, axis=-1), axis=-1)
    order = ops.take_along_axis(order, by_number, axis=-1)
    rank = ops.cast(ops.argsort(order, axis=-1), "int32")
    # The rank at which the document's positions in the same bucket begin.
    bucket, number = (ops.take_along_axis(x, order, axis=-1) for x in (bucket, number))
    goes_on = ops.logical_and(
        bucket[..., 1:] == bucket[..., :-1], number[..., 1:] == number[..., :-1]
    )
    begins = pad(ops.cast(ops.logical_not(goes_on), "int32"), [(0, 0)] * 3 + [(1, 0)])
    run = running_count(begins)
    first = ops.take_along_axis(_count_below(run, run), rank, axis=-1)

    start = steps - position
    if config.aligned:
        chunk = own = (rank - first) // chunk_size
    else:
        own = (rank - start) // chunk_size
        chunk = own - (first - start) // chunk_size
    # A number for each chunk of the bucket, at most the rank of its last position.
    code = first + chunk
    before = ops.where(chunk > 0, code - 1, -2)
    if config.across_buckets:
        code = start + own
        last = (position + later) // chunk_size
        before = ops.where(own > 0, code - 1, ops.where(last > 0, start + last, -2))
    return ops.where(kept, code, -1), ops.where(kept, before, -2)


def make_layout(chunks, chunk_size, floats_per_position):
    """The `Layout` of `Chunks` whose last position is hidden.

    Args:
        chunks: `Chunks`.
        chunk_size: Slots per chunk.
        floats_per_position: Floats per position in a step.
    """
    order, starts, first, number, *_ = chunks
    batch, heads, rounds, length = shape_of(order)
    most = _most_chunks(number, length, chunk_size)
    _, chunks_in_tile, tiles = chunk_layout(
        most * chunk_size, chunk_size, batch, floats_per_position
    )

    def tokens(chunk):
        """The positions in these chunks, `(batch, heads, rounds, slots)`."""
        group = _count_below(first, chunk + 1) - 1
        start = ops.take_along_axis(starts, group, axis=-1)
        end = ops.take_along_axis(starts, group + 1, axis=-1)
        skipped = chunk - ops.take_along_axis(first, group, axis=-1)
        index = (start + skipped * chunk_size)[..., None]
        index = index + ops.arange(chunk_size, dtype="int32")
        filled = index < end[..., None]
        shape = (batch, heads, rounds, shape_of(chunk)[-1] * chunk_size)
        index = ops.reshape(ops.where(filled, index, 0), shape)
        token = ops.take_along_axis(order, index, axis=-1)
        return ops.where(ops.reshape(filled, shape), token, length - 1)

    last = ops.sum(number, axis=-1, keepdims=True)
    last = ops.cast(last, "int32") - 1
    return Layout(
        token=tokens(ops.arange(tiles * chunks_in_tile, dtype="int32")),
        last_token=tokens(ops.where(last < 0, 0, last)),
        chunks_in_tile=chunks_in_tile,
        tiles=tiles,
    )


def _most_chunks(chunks, length, chunk_size):
    """The number of chunks that can hold all positions.

    Args:
        chunks: Integers `(batch, heads, rounds, groups)`, chunks of each group.
        length: Number of positions.
        chunk_size: Slots of a chunk.
    """
    if are_values_known(chunks):
        return max(1, int(ops.max(ops.sum(chunks, axis=-1), initial=0)))
    return (length + chunks.shape[-1] * (chunk_size - 1)) // chunk_size


def _count_below(ascending, values):
    """The number of elements of each row below each value, by binary search.

    Args:
        ascending: Integers `(..., length)`, in ascending order.
        values: Integers `(count,)` or `(..., count)`.

    Returns:
        Integers `(..., count)`.
    """
    length = shape_of(ascending)[-1]
    values = values + ops.zeros_like(ascending[..., :1])
    steps = (length if isinstance(length, int) else MAX_CODE).bit_length()
    count = ops.zeros_like(values)
    for step in reversed(range(steps)):
        more = count + 2**step
        inside = more <= length
        element = ops.take_along_axis(
            ascending, ops.where(inside, more - 1, 0), axis=-1
        )
        more_below = ops.logical_and(inside, element < values)
        count = ops.where(more_below, more, count)
    return count


def num_rotation_rows(num_buckets):
    """Number of random directions for these buckets: half of each factor."""
    return sum(num_buckets) // 2


def hash_buckets(x, rotations, num_buckets):
    """The bucket of each vector, in each round: `argmax([xR; −xR])`.

    With several factors, `num_buckets=(b₁, b₂)`, each factor has its own rotations, and
    the bucket is `h₁ + b₁ h₂`: b₁ · b₂ buckets at the cost of b₁ + b₂.

    Args:
        x: `(batch, length, heads, dim)`. Gets no gradient.
        rotations: `(rounds, heads, dim, sum(num_buckets) / 2)`.
        num_buckets: Tuple of even integers.

    Returns:
        Integers `(batch, heads, rounds, length)`, below the product of `num_buckets`.

    Reference:
        - [Andoni et al., 2015](https://arxiv.org/abs/1509.02897)
    """
    x = ops.stop_gradient(x)
    rotated = ops.einsum("bnhd,rhdk->bhrnk", x, ops.cast(rotations, x.dtype))
    bucket, start = None, 0
    for i, size in enumerate(num_buckets):
        part = rotated[..., start : start + size // 2]
        start += size // 2
        digit = greatest_index(ops.concatenate([part, -part], axis=-1))
        digit = digit * math.prod(num_buckets[:i])
        bucket = digit if bucket is None else bucket + digit
    return bucket


@dataclasses.dataclass(frozen=True)
class LSHConfig:
    """The chunking of buckets, and the chunks that a position sees.

    Attributes:
        num_buckets: Number of buckets.
        chunk_size: Positions per chunk.
        causal: Whether position `t` sees `0..t` only.
        aligned: Whether each bucket starts a new chunk.
        across_buckets: Whether positions see other buckets of a chunk.
        scale: Factor of the logits.

    Raises:
        ValueError: For sizes that are not positive integers, or for `across_buckets`
            with aligned chunks.
    """

    num_buckets: int
    chunk_size: int
    causal: bool = False
    aligned: bool = False
    across_buckets: bool = False
    scale: float = 1.0

    def __post_init__(self):
        as_python_numbers(self, "num_buckets", "chunk_size", "scale")
        check_positive_int("num_buckets", self.num_buckets)
        check_positive_int("chunk_size", self.chunk_size)
        check_number("scale", self.scale)
        if self.aligned and self.across_buckets:
            raise ValueError(
                "`across_buckets=True` needs `aligned=False`: an aligned chunk holds "
                "one bucket. Received: across_buckets=True, aligned=True"
            )

    def check_length(self, length):
        """Raises `ValueError` for more positions than the sort can hold."""
        # The sort key of the last hidden position; buckets are centred at zero.
        last_key = (self.num_buckets - self.num_buckets // 2) * (length + 1) + length
        last_code = length + (0 if self.across_buckets else 2 * self.num_buckets)
        if last_key >= 2**31 or last_code > MAX_CODE:
            raise ValueError(
                "The length, or `num_buckets`, is too large for LSH attention, which "
                "sorts by 32-bit keys and counts in float32: ⌈`num_buckets` / 2⌉ · "
                "(`length` + 1) + `length` must be below 2^31, and `length`, plus 2 · "
                "`num_buckets` unless `across_buckets`, at most 2^24. Received: "
                f"length={length}, num_buckets={self.num_buckets}, "
                f"across_buckets={self.across_buckets}"
            )
