"""Rows of a batch whose positions do not all exist."""

import dataclasses
import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of


def take_rows(table, index):
    """Entries of several tables.

    Args:
        table: `(*tables, length, ...)`.
        index: Integers `(*tables, count)`.

    Returns:
        `(*tables, count, ...)`.
    """
    axes = len(index.shape) - 1
    *tables, length = shape_of(table)[: axes + 1]
    tail = shape_of(table)[axes + 1 :]
    number = math.prod(tables)
    offset = ops.arange(number, dtype="int32") * length
    index = ops.cast(index, "int32") + ops.reshape(offset, (*tables, 1))
    return ops.take(ops.reshape(table, (number * length, *tail)), index, axis=0)


def row_lengths(mask):
    """The positions of each row that a mask keeps: int32 `(batch,)`, `None` for all.

    Args:
        mask: `(batch, length)`, or `None`.
    """
    if mask is None:
        return None
    return ops.cast(ops.sum(ops.cast(mask, "int32"), axis=1), "int32")


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """An order of each row's positions: those that exist, then the others.

    Attributes:
        index: Integers `(batch, length)`: the position that each place takes.
        place: Integers `(batch, length)`: the place of each position.
        exists: Boolean `(batch, length)`: whether the position in a place exists.
    """

    index: object
    place: object
    exists: object

    @classmethod
    def of(cls, mask):
        """The order for a mask `(batch, length)`; equal kinds keep theirs."""
        mask = ops.cast(mask, "bool")
        position = ops.arange(shape_of(mask)[1], dtype="int32")
        earlier = ops.cast(ops.cumsum(ops.cast(mask, "int32"), axis=1), "int32")
        lengths = row_lengths(mask)[:, None]
        place = ops.where(mask, earlier - 1, lengths + position - earlier)
        return cls(ops.argsort(place, axis=-1), place, position < lengths)

    def to_front(self, x):
        """`(batch, length, ...)` in this order."""
        return take_rows(x, self.index)

    def to_places(self, x):
        """`(batch, length, ...)` from this order back to the positions."""
        return take_rows(x, self.place)
