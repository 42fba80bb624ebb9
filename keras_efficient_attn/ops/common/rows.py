"""Rows of a batch whose positions do not all exist."""

import dataclasses
import math
import typing

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of

if BACKEND == "jax":
    import jax


def take_rows(index, *sources):
    """Entries of several sources at the same places.

    Args:
        index: Integers `(*tables, count)`.
        *sources: Tensors `(*tables, length, ...)`.

    Returns:
        A list of `(*tables, count, ...)`.
    """
    axes = len(index.shape) - 1
    if BACKEND == "jax":
        # A gather of which XLA knows that tables are independent: it splits them over
        # devices, and moves no table.
        take = _entries
        for _ in range(axes):
            take = jax.vmap(take)
        return [take(source, index) for source in sources]
    *tables, length = shape_of(sources[0])[: axes + 1]
    number = math.prod(tables)
    offset = ops.arange(number, dtype="int32") * length
    index = ops.cast(index, "int32") + ops.reshape(offset, (*tables, 1))
    taken = []
    for source in sources:
        tail = shape_of(source)[axes + 1 :]
        flat = ops.reshape(source, (number * length, *tail))
        taken.append(ops.take(flat, index, axis=0))
    return taken


def _entries(table, index):
    return table.at[index].get(mode="clip")


class Rows(typing.NamedTuple):
    """The lengths and the documents of the rows of a call.

    Attributes:
        lengths: With a state, the positions of the segment that exist, at its
            beginning: int32 `(batch,)`; `None` for all.
        documents: Without a state, the `Documents` of queries and keys, which are
            equally long; `None` for one in each row.
    """

    lengths: object = None
    documents: object = None


# Rows of one document each, all of whose positions exist.
WHOLE_ROWS = Rows()


def running_count(mask):
    """How many of `(..., length)` are true up to each: int32 of that shape."""
    return ops.cast(ops.cumsum(ops.cast(mask, "int32"), axis=-1), "int32")


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
        earlier = running_count(mask)
        lengths = row_lengths(mask)[:, None]
        place = ops.where(mask, earlier - 1, lengths + position - earlier)
        return cls(ops.argsort(place, axis=-1), place, position < lengths)

    def to_front(self, x):
        """`(batch, length, ...)` in this order."""
        return take_rows(self.index, x)[0]

    def to_places(self, x):
        """`(batch, length, ...)` from this order back to the positions."""
        return take_rows(self.place, x)[0]
