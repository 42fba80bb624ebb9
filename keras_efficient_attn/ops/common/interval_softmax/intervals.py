"""Patterns in which a query sees all keys of a few intervals.

A pattern is hashable, has the number of its `keys`, and `intervals(i)`: pairs of the
first and the last key of each interval that query `i` sees; an interval may be empty.
It uses only operators, so that it works for NumPy arrays and tensors alike.
"""

import dataclasses

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


def sees(pattern, i, j):
    """Whether query `i` sees key `j`."""
    seen = j < 0
    for first, last in pattern.intervals(i):
        seen = seen | ((j >= first) & (j <= last))
    return seen
