"""The arguments of a sparse pattern."""

import dataclasses

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_name,
    check_positive_int,
    is_positive_int,
)
from keras_efficient_attn.ops.common.masks import (
    Columns,
    QueryBlocks,
    SlidingWindow,
    Summaries,
)

PATTERNS = ("strided", "fixed")
FACTORS = ("merged", "split", 0, 1)
# Names of the second factor's cache in a state.
FAR = ("far_key", "far_value", "far_mask")


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """A pattern of two factors, and their heads; checks its values.

    Args:
        pattern: `"strided"` or `"fixed"`.
        stride: Positive integer.
        summary: Positions of a block that all queries see in the fixed pattern.
        factors: `"merged"`, `"split"`, `0` or `1`.
        num_heads: Number of heads.

    Attributes:
        near_heads: Number of heads, counted from the first, with the first factor.
        far_heads: Number of heads, counted from the last, with the second factor.
        merges: Whether each head sees both factors.

    Raises:
        ValueError: For arguments that define no pattern.
    """

    pattern: str
    stride: int
    summary: int
    factors: str | int
    num_heads: int
    near_heads: int = dataclasses.field(init=False, compare=False)
    far_heads: int = dataclasses.field(init=False, compare=False)
    merges: bool = dataclasses.field(init=False, compare=False)

    def __post_init__(self):
        as_python_numbers(self, "stride", "summary", "factors")
        check_name("pattern", self.pattern, PATTERNS)
        check_positive_int("stride", self.stride)
        if not is_positive_int(self.summary) or self.summary > self.stride:
            raise ValueError(
                "`summary` must be a positive integer, at most `stride`. Received: "
                f"summary={self.summary!r}, stride={self.stride}"
            )
        if self.pattern == "strided" and self.summary != 1:
            raise ValueError(
                f"`summary` needs pattern='fixed'. Received: summary={self.summary}, "
                f"pattern={self.pattern!r}"
            )
        if isinstance(self.factors, bool | float) or self.factors not in FACTORS:
            raise ValueError(
                "`factors` must be 'merged', 'split', 0 or 1. Received: "
                f"factors={self.factors!r}"
            )
        if self.factors == 0 and self.summary != 1:
            raise ValueError(
                "`summary` has no effect with factors=0, which leaves out the second "
                f"factor: omit it. Received: summary={self.summary}, factors=0"
            )
        if self.factors == "split" and self.num_heads < 2:
            raise ValueError(
                "factors='split' needs at least two heads. Received: "
                f"num_heads={self.num_heads}"
            )
        near = far = self.num_heads
        if self.factors == "split":
            near, far = (self.num_heads + 1) // 2, self.num_heads // 2
        object.__setattr__(self, "near_heads", 0 if self.factors == 1 else near)
        object.__setattr__(self, "far_heads", 0 if self.factors == 0 else far)
        object.__setattr__(self, "merges", self.factors == "merged")

    def masks(self, causal):
        """The mask functions of both factors.

        The first covers the previous `stride` positions, or the query's block. The
        second excludes keys that a head sees through the first.
        """
        stride = self.stride
        if self.pattern == "strided":
            near = SlidingWindow(stride + 1, causal)
            return near, Columns(stride, causal, self.merges)
        near = QueryBlocks(stride, 0, causal)
        return near, Summaries(stride, causal, self.merges)

    def kernel_obstacle(self, name, causal):
        """The reason why a kernel cannot compute the pattern, or `None`."""
        fixed = self.pattern == "fixed"
        if fixed and self.far_heads and not self.merges and causal:
            return (
                "needs factors='merged' or 0 with pattern='fixed' and a causal call. "
                f"Received: factors={self.factors!r}"
            )
        return None

    def dropouts(self, options, seed):
        """`(rate, seed)` of each factor, or `None`; each factor has its own bits."""
        if not options.dropout:
            return None, None
        return options.dropout_and_seed(seed), options.dropout_and_seed(ops.flip(seed))

    def split_heads(self, *tensors):
        """The tensors of the heads with the first factor, and with the second.

        Args:
            *tensors: `(batch, length, heads, dim)`, or `(batch, length)` for all heads.
        """
        near, far = self.near_heads, self.num_heads - self.far_heads
        return (
            [t if len(t.shape) == 2 else t[:, :, :near] for t in tensors],
            [t if len(t.shape) == 2 else t[:, :, far:] for t in tensors],
        )

    def capacity(self, far_key):
        """Capacity of a cache `(batch, slots, heads, dim)` in positions."""
        return (
            far_key.shape[1]
            // self.summary
            * (self.stride if self.pattern == "fixed" else 1)
        )


def summary_start(stride, summary, head):
    """The start of a head's summary of `summary` positions within its block.

    The first head has the end of the block; each further head has the positions before.
    """
    return stride - (head % (stride // summary) + 1) * summary


def head_factors(config):
    """The factors of each head of a `SparseConfig`: `(has the first, number)`.

    The number counts the heads with the second factor; `None` for those without.
    """
    numbers = [None] * (config.num_heads - config.far_heads)
    numbers += range(config.far_heads)
    return [(head < config.near_heads, n) for head, n in enumerate(numbers)]


def sparse_pairs(length, causal, config):
    """Number of visible query-key pairs of all heads of a `SparseConfig`."""
    i, stride, summary = np.arange(length), config.stride, config.summary
    # For each query: keys of the first factor, of the second, and of both.
    if config.pattern == "strided":
        counts = np.minimum(i, stride) + 1, i // stride + 1, 1 + (i >= stride)
        if not causal:
            # Symmetric; the query itself counts once.
            counts = tuple(n + n[::-1] - 1 for n in counts)

        def counts_of_head(number):
            return counts
    else:
        # The last visible position, and the query's block up to it.
        last = i if causal else np.minimum(i - i % stride + stride, length) - 1
        own = last % stride + 1
        end = i if causal else np.full(length, length - 1)

        def counts_of_head(number):
            start = summary_start(stride, summary, number)
            both = np.clip(own - start, 0, summary)
            in_last = np.clip(end % stride + 1 - start, 0, summary)
            return own, end // stride * summary + in_last, both

    total = 0
    for near, number in head_factors(config):
        first, second, both = counts_of_head(number or 0)
        has_far = number is not None
        total += near * first.sum() + has_far * second.sum()
        total -= (near and has_far) * both.sum()
    return int(total)
