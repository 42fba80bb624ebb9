"""The strided pattern's second factor: softmax within the columns of a table.

The sequence fills a table of `stride` columns row by row; a query sees the keys of its
own column.
"""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_blocks
from keras_efficient_attn.ops.common.chunking import by_column, by_row, chunk_count


def attend_columns(query, key, value, valid, mask_fn, dropout):
    """Partial softmax of every column, for `(batch, length, heads, dim)`."""
    length, stride = shape_of(query)[1], mask_fn.stride
    rows = chunk_count(length, stride)
    query, key, value, valid = (
        by_column(t, rows, stride) for t in (query, key, value, valid)
    )
    positions = (ops.arange(rows, dtype="int32") * stride,) * 2
    part = attend_blocks(query, key, value, valid, mask_fn, positions, dropout)
    return tuple(by_row(t)[:, :length] for t in part)


def attend_cached_columns(query, cache, mask_fn, start, dropout):
    """Partial softmax of a segment over a cache that already holds the segment.

    Args:
        query: `(batch, length, heads, dim)`, from position `start` on.
        cache: Keys and values `(batch, capacity, heads, dim)`, position `s` in slot
            `s`, and masks `(batch, capacity)`, 0 for slots that hold no key.
        mask_fn: A causal `Columns`.
        start: Scalar.
        dropout: `(rate, seed)` or `None`.
    """
    length, stride = shape_of(query)[1], mask_fn.stride
    # A segment shorter than a row reads only its own columns.
    columns = min(stride, length) if isinstance(length, int) else stride
    rows = chunk_count(length, columns)
    step = ops.arange(columns, dtype="int32")
    chosen = (start + step) % stride
    cached = cache[0].shape[1] // stride

    def read(x):
        batch, _, *tail = shape_of(x)
        x = ops.reshape(x, (batch, cached, stride, *tail))
        return ops.swapaxes(ops.take(x, chosen, axis=2), 1, 2)

    positions = (
        start + step[:, None] + columns * ops.arange(rows, dtype="int32"),
        chosen[:, None] + stride * ops.arange(cached, dtype="int32"),
    )
    query = by_column(query, rows, columns)
    part = attend_blocks(query, *map(read, cache), mask_fn, positions, dropout)
    return tuple(by_row(t)[:, :length] for t in part)
