"""The second factors of sparse patterns, as mask functions."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Columns:
    """The strided pattern's second factor: every `stride`-th position.

    Attributes:
        stride: Positions between two keys.
        causal: Whether earlier ones only.
        remainder: Whether without what the first factor holds.
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
            # Before the own block, or up to the query.
            return j < i - i % self.stride if self.remainder else j <= i
        block, key_block = i // self.stride, j // self.stride
        return key_block != block if self.remainder else key_block >= 0 * block


def summary_start(stride, summary, head):
    """Where in its block a head's summary of `summary` positions begins.

    The first head has the end of the block, each further one the positions before.
    """
    return stride - (head % (stride // summary) + 1) * summary


def head_factors(config):
    """The factors of each head of a `SparseConfig`: `(has the first, number)`.

    The number counts the heads with the second factor; `None` for those without.
    """
    numbers = [None] * (config.num_heads - config.far_heads)
    numbers += range(config.far_heads)
    return [(head < config.near_heads, n) for head, n in enumerate(numbers)]
