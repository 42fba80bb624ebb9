"""Positions of the summaries of sparse patterns, and factors of heads."""


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
