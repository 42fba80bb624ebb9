"""Mask functions: the keys that a query sees, by the positions of both.

A mask function takes the positions of queries and keys, integers that broadcast, and
uses only operators, so that it works for NumPy arrays and tensors alike. It is
hashable: each has its own compiled step. Mask functions over one axis have

- `period`: positions after which the pattern repeats;
- `before`, `after`: the reach beyond both ends of a block of length `period` that
  starts at a multiple of `period`;
- `reach`: the number of earlier positions that a single query can see;
- `sees_all_in_reach`: whether a causal query sees all keys within its reach;
- `interval(i)`: the first and the last key that a query sees.
"""

import dataclasses


class IntervalMask:
    """A mask function whose queries see all keys between two positions."""

    def __call__(self, i, j):
        first, last = self.interval(i)
        return (j >= first) & (j <= last)

    @property
    def after(self):
        return 0 if self.causal else self.before


@dataclasses.dataclass(frozen=True)
class SlidingWindow(IntervalMask):
    """Itself and `window - 1` earlier keys and, if not causal, as many later ones."""

    window: int
    causal: bool

    period = 1
    sees_all_in_reach = True

    @property
    def before(self):
        return self.window - 1

    reach = before

    def interval(self, i):
        earlier = self.window - 1
        return i - earlier, i if self.causal else i + earlier


@dataclasses.dataclass(frozen=True)
class QueryBlocks(IntervalMask):
    """The query's own block of `period` positions, and `before` positions before it.

    If not causal, the whole block, and as many positions after it.
    """

    period: int
    before: int
    causal: bool

    sees_all_in_reach = False

    @property
    def reach(self):
        return self.before + self.period - 1

    def interval(self, i):
        start = i - i % self.period
        end = i if self.causal else start + self.period - 1 + self.before
        return start - self.before, end


@dataclasses.dataclass(frozen=True)
class Columns:
    """The strided pattern's second factor: every `stride`-th position.

    Attributes:
        stride: Positions between two keys.
        causal: Whether a query sees earlier keys only.
        remainder: Whether to exclude the keys of the first factor.
    """

    stride: int
    causal: bool
    remainder: bool

    def __call__(self, i, j):
        distance = i - j
        seen = distance % self.stride == 0
        if self.causal:
            seen = seen & (distance >= 0)
        if self.remainder:
            seen = seen & ((distance > self.stride) | (distance < -self.stride))
        return seen


@dataclasses.dataclass(frozen=True)
class Summaries:
    """The fixed pattern's second factor, over keys that are summaries of their block.

    Attributes: As `Columns`.
    """

    stride: int
    causal: bool
    remainder: bool

    def __call__(self, i, j):
        if self.causal:
            # Before the query's block, or up to the query.
            return j < i - i % self.stride if self.remainder else j <= i
        block, key_block = i // self.stride, j // self.stride
        return key_block != block if self.remainder else key_block >= 0 * block
