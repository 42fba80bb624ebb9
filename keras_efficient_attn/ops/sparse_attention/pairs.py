"""Numbers of query-key pairs in sparse patterns."""

import numpy as np

from keras_efficient_attn.ops.sparse_attention.patterns import (
    head_factors,
    summary_start,
)


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
