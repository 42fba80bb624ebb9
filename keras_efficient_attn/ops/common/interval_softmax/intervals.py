"""Patterns in which a query sees all keys of a few intervals.

A pattern is hashable, has the number of its `keys`, and `intervals(i)`: pairs of the
first and the last key of each interval that query `i` sees; an interval may be empty.
It uses only operators, so that it works for NumPy arrays and tensors alike.
"""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.chunking import by_column, by_row
from keras_efficient_attn.ops.common.masks import QueryBlocks, SlidingWindow


@dataclasses.dataclass(frozen=True)
class NearKeys:
    """The keys that a mask function of `ops.common.masks` allows."""

    mask_fn: SlidingWindow | QueryBlocks
    keys: int

    def intervals(self, i):
        first, last = self.mask_fn.interval(i)
        # The smaller of both.
        beyond = last > self.keys - 1
        return ((first, last - (last - self.keys + 1) * beyond),)


@dataclasses.dataclass(frozen=True)
class AllKeys:
    """All keys."""

    keys: int

    def intervals(self, i):
        return ((0, self.keys - 1),)


def sequences(step, *tensors):
    """`(batch, length, ...)` as `(batch · step, length / step, ...)`; keeps `None`.

    Args:
        step: Positions from one of a sequence to its next; divides the length.
        *tensors: Tensors, or `None`.
    """

    def split(x):
        x = by_column(x, x.shape[1] // step, step)
        return ops.reshape(x, (-1, *x.shape[2:]))

    return [x if x is None or step == 1 else split(x) for x in tensors]


def interleave(step, *tensors):
    """Undoes `sequences`, as a list."""

    def join(x):
        return by_row(ops.reshape(x, (-1, step, *x.shape[1:])))

    return [x if step == 1 else join(x) for x in tensors]
