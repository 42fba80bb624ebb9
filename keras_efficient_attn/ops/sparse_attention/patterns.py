"""The strided and the fixed pattern of Sparse Transformers, as rules."""

import dataclasses

import numpy as np

from keras_efficient_attn.ops.common.checks import is_positive_int
from keras_efficient_attn.ops.common.masks import QueryBlocks, SlidingWindow

PATTERNS = ("strided", "fixed")
HEADS = ("merged", "split", 0, 1)


def near_rule(pattern, stride, causal):
    """The first factor: the previous `stride` positions, or the own block."""
    if pattern == "strided":
        return SlidingWindow(stride + 1, causal)
    return QueryBlocks(stride, 0, causal)


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
        near = near_heads(heads, num_heads)
        far = range(num_heads - near)
        return [(True, None)] * near + [(False, head) for head in far]
    if heads == 0:
        return [(True, None)] * num_heads
    return [(False, head) for head in range(num_heads)]


def near_heads(heads, num_heads):
    """How many heads, the first ones, have the first factor."""
    if heads == "split":
        return (num_heads + 1) // 2
    return 0 if heads == 1 else num_heads


def far_heads(heads, num_heads):
    """How many heads, the last ones, have the second factor."""
    if heads == "split":
        return num_heads // 2
    return 0 if heads == 0 else num_heads


def sparse_pattern(
    length,
    pattern="strided",
    *,
    stride,
    summary=1,
    heads="merged",
    num_heads=None,
    causal=True,
):
    """Which keys each query of `sparse_attention` sees, for plots and tests.

    Args:
        length: Number of positions.
        pattern, stride, summary, heads: As for `sparse_attention`.
        num_heads: Number of heads. Defaults to 1, and 2 for `heads="split"`.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `True`.

    Returns:
        Boolean NumPy array `(num_heads, length, length)`: rows are queries.

    Raises:
        ValueError: For arguments that make no pattern.

    Example:

    >>> from keras_efficient_attn.ops import sparse_pattern
    >>> sparse_pattern(6, "fixed", stride=3)[0].astype(int)
    array([[1, 0, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0, 0],
           [0, 0, 1, 1, 1, 0],
           [0, 0, 1, 1, 1, 1]])
    """
    if num_heads is None:
        num_heads = 2 if heads == "split" else 1
    check_sparse_pattern(pattern, stride, summary, heads, num_heads)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    first = near_rule(pattern, stride, causal)(i, j)
    matrices = []
    for near, number in head_factors(heads, num_heads):
        seen = first if near else np.zeros_like(first)
        if number is not None and pattern == "strided":
            seen = seen | Columns(stride, causal, False)(i, j)
        elif number is not None:
            offset = j % stride - summary_start(stride, summary, number)
            second = Summaries(stride, causal, False)(i, j)
            seen = seen | (second & (offset >= 0) & (offset < summary))
        matrices.append(seen)
    return np.stack(matrices)


def check_sparse_pattern(pattern, stride, summary, heads, num_heads):
    """Raises `ValueError` for arguments that make no pattern."""
    if pattern not in PATTERNS:
        raise ValueError(
            f"`pattern` must be one of {', '.join(PATTERNS)}. Received: "
            f"pattern={pattern!r}"
        )
    if not is_positive_int(stride):
        raise ValueError(
            f"`stride` must be a positive integer. Received: stride={stride!r}"
        )
    if not is_positive_int(summary) or summary > stride:
        raise ValueError(
            "`summary` must be a positive integer, at most `stride`. Received: "
            f"summary={summary!r}, stride={stride}"
        )
    if pattern == "strided" and summary != 1:
        raise ValueError(
            "`summary` is for pattern='fixed'. Received: "
            f"summary={summary}, pattern={pattern!r}"
        )
    if isinstance(heads, bool) or heads not in HEADS:
        raise ValueError(
            f"`heads` must be 'merged', 'split', 0 or 1. Received: heads={heads!r}"
        )
    if heads == 0 and summary != 1:
        raise ValueError(
            "`summary` is for the second factor, which heads=0 leaves out. Received: "
            f"summary={summary}, heads=0"
        )
    if heads == "split" and num_heads < 2:
        raise ValueError(
            f"heads='split' needs two heads at least. Received: num_heads={num_heads}"
        )
