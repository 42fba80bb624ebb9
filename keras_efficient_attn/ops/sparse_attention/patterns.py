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
        block, key_block = i // self.stride, j // self.stride
        if self.causal:
            return key_block < block if self.remainder else j <= i
        return key_block != block if self.remainder else key_block >= 0 * block


def summary_start(stride, summary, head):
    """Where in its block a head's summary of `summary` positions begins.

    The first head has the end of the block, the others what is before it, in turn.
    """
    return stride - (head % (stride // summary) + 1) * summary


def head_factors(heads, num_heads):
    """What each head attends to: `(the first factor?, its number in the second)`.

    Heads without the second factor have no number in it.
    """
    if heads == "merged":
        return [(True, head) for head in range(num_heads)]
    if heads == "split":
        near = (num_heads + 1) // 2
        far = range(num_heads - near)
        return [(True, None)] * near + [(False, head) for head in far]
    if heads == 0:
        return [(True, None)] * num_heads
    return [(False, head) for head in range(num_heads)]
