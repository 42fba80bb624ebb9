"""The documents that share the rows of a batch: they do not see one another."""

import typing

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import lower_triangle, pad_length
from keras_efficient_attn.ops.common.rows import (
    RowOrder,
    row_lengths,
    running_count,
    take_rows,
)


def document_numbers(ids):
    """How often `ids` `(batch, length)` change up to each position, first from 0."""
    earlier = pad_length(ids, 1, 0)[:, :-1]
    return running_count(ops.not_equal(ids, earlier))


class Documents(typing.NamedTuple):
    """The documents of rows, each one or more positions in succession.

    Attributes:
        number: int32 `(batch, length)`: the number of the document in its row, from 1
            if the first id is 0, which a state may go on with, and otherwise from 2.
        position: int32 `(batch, length)`: positions of the document before this one.
        later: int32 `(batch, length)`: positions of the document after this one.
    """

    number: object
    position: object
    later: object

    @classmethod
    def of(cls, ids, order=None):
        """The documents of ids.

        Args:
            ids: Integers `(batch, length)`; a document begins where they change.
            order: The `RowOrder` to which the positions were moved. Defaults to
                `None`: they all exist.
        """
        length = shape_of(ids)[1]
        steps = ops.arange(length, dtype="int32")
        number = 1 + document_numbers(ids)
        number = number if order is None else order.to_front(number)
        begins = ops.not_equal(number, pad_length(number, 1, 0)[:, :-1])
        end = length + ops.zeros_like(number[:, :1])
        if order is not None:
            end = row_lengths(order.exists)[:, None]
            begins = ops.logical_and(begins, steps < end)
        first = RowOrder.of(begins).index
        count = ops.sum(ops.cast(begins, "int32"), axis=1, keepdims=True)
        last = ops.concatenate([first[:, 1:], end], axis=1)
        last = ops.where(steps + 1 < count, last, end)
        index = ops.maximum(running_count(begins) - 1, 0)
        start, stop = take_rows(index, first, last)
        later = ops.maximum(ops.cast(stop, "int32") - 1 - steps, 0)
        return cls(number, steps - ops.cast(start, "int32"), later)


class ChunkMasks(typing.NamedTuple):
    """The keys of their own document that positions see, chunk by chunk, if causal.

    Attributes:
        near: `(batch, 1, chunks, size, size)`: keys of the chunk that a query sees.
        reads: `(batch, 1, chunks, size)`: queries that see keys before the chunk.
        last: `(batch, 1, chunks, size)`: keys of the chunk's last document.
        goes_on: `(batch, 1, chunks)`: whether this document began before the chunk.
        chain: `(batch, 1, chunks + 1, chunks + 1)`: of the state and the chunks
            (columns), those that hold keys of the document before each chunk, and
            after the last (rows).
    """

    near: object
    reads: object
    last: object
    goes_on: object
    chain: object

    @classmethod
    def of(cls, position, size):
        """The masks for numbers of earlier keys that queries see.

        Args:
            position: int32 `(batch, chunks · size)`: the keys before a query's own
                that it sees; negative if it does not see its own.
            size: Positions per chunk.
        """
        batch, group = shape_of(position)
        chunks = group // size
        position = ops.reshape(position, (batch, 1, chunks, size))
        steps = ops.arange(size, dtype="int32")
        distance = steps[:, None] - steps
        near = ops.logical_and(distance >= 0, distance <= position[..., None])
        end = position[..., -1:]
        goes_on = end[..., 0] >= size
        begun = running_count(ops.logical_not(goes_on))
        begun = ops.concatenate([ops.zeros_like(begun[..., :1]), begun], axis=-1)
        same = begun[..., :, None] == begun[..., None, :]
        return cls(
            near,
            position > steps,
            size - 1 - steps <= end,
            goes_on,
            ops.logical_and(same, lower_triangle(chunks + 1)),
        )
