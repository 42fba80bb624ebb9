"""Decays inside a chunk, and dot products of vectors that decay on the way.

What lies between two positions is added up between these two, not taken as a
difference of sums from the start: after some strong decays that would have few digits.
"""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import lower_triangle
from keras_efficient_attn.ops.common.numerics import cumulative_sum
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

# Positions whose decays by feature are taken pair by pair.
BLOCK = 16


def decay_from_start(log_decay):
    """The sums up to and including each position, along the last axis but one."""
    return cumulative_sum(log_decay, len(log_decay.shape) - 2)


def decay_to_end(log_decay):
    """The sums after each position, along the last axis but one."""
    later = ops.concatenate(
        [log_decay[..., 1:, :], ops.zeros_like(log_decay[..., :1, :])], axis=-2
    )
    return ops.flip(decay_from_start(ops.flip(later, axis=-2)), axis=-2)


def decayed_products(lefts, key, log_decay):
    """`Σ_i x[t]_i k[s]_i exp(Σ_{s < r ≤ t} g[r]_i)` for `s ≤ t`, and 0 for others.

    No exponential exceeds 1, however strong the decay.

    Args:
        lefts: The `x`, a list of `(..., length, features)`.
        key: `(..., length, features)`.
        log_decay: g, `(..., length, 1)` or `(..., length, features)`, not positive; or
            `None` for 0.

    Returns:
        A list of `(..., length, length)`.
    """
    if log_decay is not None and log_decay.shape[-1] != 1:
        return _by_feature(lefts, key, log_decay)
    factors = None
    if log_decay is not None:
        lower = lower_triangle(shape_of(log_decay)[-2])
        change = ops.where(ops.tril(lower, k=-1), log_decay, 0.0)
        change = decay_from_start(change)
        factors = ops.exp(ops.where(lower, change, LOG_ZERO))
    products = []
    for x in lefts:
        product = x @ ops.swapaxes(key, -1, -2)
        products.append(ops.tril(product) if factors is None else product * factors)
    return products


def _by_feature(lefts, key, log_decay):
    """The products of decays that differ by feature.

    Between blocks, keys decay to the start of the query's block and queries from
    there; inside a block, each pair has its own factors.
    """
    *batch, length, features = shape_of(key)
    count = -(-length // BLOCK)
    block = -(-length // count)
    padding = [(0, 0)] * len(batch) + [(0, count * block - length), (0, 0)]

    def by_block(x):
        if count * block > length:
            x = ops.pad(x, padding)
        return ops.reshape(x, (*batch, count, block, features))

    log_decay, key = by_block(log_decay), by_block(key)
    inner, outer = decay_from_start(log_decay), decay_to_end(log_decay)

    # (..., count, block, block, features): from a key to a query of its block.
    inside = np.tril(np.ones((block, block), bool))[..., None]
    change = inner[..., :, None, :] - inner[..., None, :, :]
    near_key = ops.exp(ops.where(inside, change, LOG_ZERO)) * key[..., None, :, :]
    own = np.eye(count, dtype=bool)[:, None, :, None]

    # (..., count, count, features): what lies between a key's block and a query's.
    first, last, at = np.ogrid[:count, :count, :count]
    between = ((last < at) & (at < first))[..., None]
    total = inner[..., -1, :][..., None, None, :, :]
    between = ops.sum(ops.where(between, total, 0.0), axis=-2)
    earlier = np.tril(np.ones((count, count), bool), -1)[..., None, None]
    change = between[..., None, :] + outer[..., None, :, :, :]
    far_key = ops.exp(ops.where(earlier, change, LOG_ZERO)) * key[..., None, :, :, :]
    whole = (*batch, count * block, count * block)
    far_key = ops.reshape(far_key, (*batch, count, count * block, features))
    far_key = ops.swapaxes(far_key, -1, -2)
    from_start = ops.exp(inner)

    products = []
    for x in map(by_block, lefts):
        far = ops.reshape((x * from_start) @ far_key, whole)
        near = ops.sum(x[..., :, None, :] * near_key, axis=-1)
        near = ops.where(own, near[..., None, :], 0.0)
        products.append((far + ops.reshape(near, whole))[..., :length, :length])
    return products
