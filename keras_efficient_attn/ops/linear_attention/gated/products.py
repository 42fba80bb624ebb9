"""Dot products of vectors that decay from one position to another."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import lower_triangle
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

# Positions whose decays by feature are taken pair by pair.
BLOCK = 16


def decayed_products(query, key, decay, diagonal=0):
    """`Σ_i q[t]_i k[s]_i exp(G[t]_i − G[s]_i)` for `s ≤ t`, and 0 for others.

    No exponential exceeds 1, however strong the decay.

    Args:
        query, key: `(..., length, features)`.
        decay: G, `(..., length, 1)` or `(..., length, features)`, which falls along
            the length; or `None` for 0.
        diagonal: -1 for `s < t` only. Defaults to 0.

    Returns:
        `(..., length, length)`.
    """
    if decay is not None and decay.shape[-1] != 1:
        products = _by_feature(query, key, decay)
    else:
        products = query @ ops.swapaxes(key, -1, -2)
        if decay is not None:
            lower = lower_triangle(shape_of(products)[-1])
            change = decay - ops.swapaxes(decay, -1, -2)
            # Above the diagonal it may be large: cut before the exponential.
            products = products * ops.exp(ops.where(lower, change, 0.0))
    return ops.tril(products, k=diagonal)


def _by_feature(query, key, decay):
    """The products on and below the diagonal, of decays that differ by feature.

    Between blocks, keys decay to the start of the query's block and queries from
    there; inside a block, each pair has its own factors.
    """
    *batch, length, features = shape_of(query)
    count = -(-length // BLOCK)
    padding = [(0, 0)] * len(batch) + [(0, count * BLOCK - length), (0, 0)]
    query, key = ops.pad(query, padding), ops.pad(key, padding)
    decay = ops.pad(decay, padding, mode="edge")
    # The decay before the first position of each block.
    ends = decay[..., BLOCK - 1 : -1 : BLOCK, :]
    start = ops.concatenate([ops.zeros_like(decay[..., :1, :]), ends], axis=-2)
    start = start[..., None, :]

    def by_block(x):
        return ops.reshape(x, (*batch, count, BLOCK, features))

    positions = np.arange(count * BLOCK)
    earlier = positions < BLOCK * np.arange(count)[:, None]
    change = ops.where(earlier[..., None], start - decay[..., None, :, :], LOG_ZERO)
    far_key = key[..., None, :, :] * ops.exp(change)
    query, block_decay = by_block(query), by_block(decay)
    far = (query * ops.exp(block_decay - start)) @ ops.swapaxes(far_key, -1, -2)

    inside = np.tril(np.ones((BLOCK, BLOCK), bool))[..., None]
    change = block_decay[..., :, None, :] - block_decay[..., None, :, :]
    factors = ops.exp(ops.where(inside, change, LOG_ZERO))
    near = query[..., :, None, :] * by_block(key)[..., None, :, :] * factors
    near = ops.sum(near, axis=-1)
    own = np.eye(count, dtype=bool)[:, None, :, None]
    near = ops.where(own, near[..., None, :], 0.0)
    whole = (*batch, count * BLOCK, count * BLOCK)
    products = ops.reshape(far, whole) + ops.reshape(near, whole)
    return products[..., :length, :length]
