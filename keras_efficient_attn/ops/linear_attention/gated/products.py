"""Decays within a chunk, and dot products of decaying vectors.

The decays between two positions are summed directly, not as a difference of prefix
sums, which would lose precision after strong decays.
"""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import lower_triangle
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.triangular import sums_after, sums_up_to

# Maximum block length for pairwise decays by feature.
BLOCK = 4


def decayed_products(lefts, key, log_decay):
    """`Σ_i x[t]_i k[s]_i exp(Σ_{s < r ≤ t} g[r]_i)` for `s ≤ t`, and 0 for others.

    No exponential exceeds 1, however strong the decay.

    Args:
        lefts: The `x`, a list of `(..., chunks, length, features)`.
        key: `(..., chunks, length, features)`.
        log_decay: g, `(..., chunks, length, 1)` or `(..., chunks, length, features)`,
            not positive; or `None` for 0.

    Returns:
        A list of `(..., chunks, length, length)`.
    """
    if log_decay is not None and log_decay.shape[-1] != 1:
        return _by_feature(lefts, key, log_decay)
    factors = None
    if log_decay is not None:
        lower = lower_triangle(shape_of(log_decay)[-2])
        change = ops.where(ops.tril(lower, k=-1), log_decay, 0.0)
        change = sums_up_to(change)
        factors = ops.exp(ops.where(lower, change, LOG_ZERO))
    products = []
    for x in lefts:
        product = x @ ops.swapaxes(key, -1, -2)
        products.append(ops.tril(product) if factors is None else product * factors)
    return products


def _by_feature(lefts, key, log_decay):
    """The products of decays that differ by feature.

    Short blocks use each pair's factors. Then two blocks are merged to one of twice the
    size: between them, keys decay to the end of the first block, and the other vectors
    from the start of the second.
    """
    *rows, chunks, length, features = shape_of(key)
    count = 1
    while count * BLOCK < length:
        count *= 2
    size = -(-length // count)
    padding = [(0, 0)] * (len(rows) + 1) + [(0, count * size - length), (0, 0)]

    def by_block(x):
        if count * size > length:
            x = pad(x, padding)
        # Blocks of all chunks share an axis: tensors of higher rank crash XLA on CPUs.
        # Heads keep theirs, which may be split over devices.
        return ops.reshape(x, (*rows, chunks * count, size, features))

    log_decay, key, *lefts = map(by_block, (log_decay, key, *lefts))
    start, end = sums_up_to(log_decay), sums_after(log_decay)
    inside = lower_triangle(size)[..., None]
    change = start[..., :, None, :] - start[..., None, :, :]
    near_key = ops.exp(ops.where(inside, change, LOG_ZERO)) * key[..., None, :, :]
    products = [ops.sum(x[..., :, None, :] * near_key, axis=-1) for x in lefts]
    while count > 1:
        (start, later), (end, last) = map(_pairs, (start, end))
        far_key = ops.swapaxes(_pairs(key)[0] * ops.exp(end), -1, -2)
        from_start = ops.exp(later)
        products = [
            _below(*_pairs(product), (_pairs(x)[1] * from_start) @ far_key)
            for x, product in zip(lefts, products, strict=True)
        ]
        # The sums over the first block, and over the second.
        first, second = start[..., -1:, :], later[..., -1:, :]
        start = ops.concatenate([start, later + first], axis=-2)
        end = ops.concatenate([end + second, last], axis=-2)
        count, size = count // 2, 2 * size
        joined = (*rows, chunks * count, size, features)
        key, *lefts = (ops.reshape(x, joined) for x in (key, *lefts))
    return [product[..., :length, :length] for product in products]


def _pairs(x):
    """The first and the second of each pair of blocks `(..., blocks, size, dim)`."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _below(first, second, between):
    """Merges two lower triangular blocks and the block below the first."""
    above = ops.concatenate([first, ops.zeros_like(between)], axis=-1)
    return ops.concatenate([above, ops.concatenate([between, second], -1)], axis=-2)
