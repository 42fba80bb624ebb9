"""Attention to keys through their codes, in linear time.

A cache holds, per code, how many keys chose it and the sum of their values. Query `t`
weighs code `c` by `exp(q·c + log count)` and reads the mean of its values; keys of the
present block, which the cache does not hold yet, are weighed one by one.
"""

import functools

import keras
from keras import ops

from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    columns,
    lower_triangle,
    pad_to,
)
from keras_efficient_attn.ops.common.numerics import larger
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divided
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.vq_attention.codebook import responsibilities

# A code with less than this is empty: its mean would be rounding.
MIN_COUNT = 1e-20


def causal_compressed_attention(
    query, key, value, valid, index, codebook, sigma, state, block_length, reduction
):
    """The part of the keys `0..t` for query `t`, through their codes.

    Args:
        query: `(batch, length, heads, dim)`.
        key: Of the same shape: the codes of the keys, or the keys if `sigma`.
        value: `(batch, length, heads, value_dim)`, zero where not valid.
        valid: `(batch, length)`, 1 for keys that exist and 0 for others.
        index: int32 `(batch, length, heads)`, the codes' indices; `None` if `sigma`.
        codebook: `(heads, codes, dim)`.
        sigma: `(heads,)`, or `None` for the nearest code alone.
        state: `(sum, count)` of shapes `(batch, heads, codes, value_dim)` and
            `(batch, heads, codes)`.
        block_length: Positions in a block.
        reduction: How the caches before the blocks are summed: `"scan"`, one block
            after the other, or several at once by `"matmul"` or `"cumsum"`.

    Returns:
        `(part, state)`: values, totals and log scales for `partial_attention.merge`,
        and the state after the last position.
    """
    size, blocks, groups = layout(query, value, codebook, block_length, reduction)
    xs = [query, key, value, columns(valid)]
    if index is not None:
        xs.append(columns(ops.cast(index, query.dtype)))
    xs = tuple(pad_to(x, groups * blocks * size) for x in xs)
    consts = (codebook,) if sigma is None else (codebook, sigma)
    step = _causal_step(size, reduction)
    state, part = recompute_scan(step, state, xs, consts, num_steps=groups)
    return tuple(y[:, : ops.shape(query)[1]] for y in part), state


def full_compressed_attention(
    query, key, value, valid, index, codebook, sigma, state, block_length
):
    """As `causal_compressed_attention`, each query attending to every valid key.

    Queries and keys may differ in length.
    """
    size, blocks, groups = layout(key, value, codebook, block_length, "cumsum")
    xs = [key, value, columns(valid)]
    if index is not None:
        xs.append(columns(ops.cast(index, query.dtype)))
    xs = tuple(pad_to(x, groups * blocks * size) for x in xs)
    consts = (codebook,) if sigma is None else (codebook, sigma)
    state, _ = recompute_scan(_key_step, state, xs, consts, num_steps=groups)

    size, blocks, groups = layout(query, value, codebook, block_length, "cumsum")
    xs = (pad_to(query, groups * blocks * size),)
    consts = (codebook, *state)
    _, part = recompute_scan(_query_step, (), xs, consts, num_steps=groups)
    return tuple(y[:, : ops.shape(query)[1]] for y in part), state


def layout(sequence, value, codebook, block_length, reduction, features=0):
    """How a sequence is cut: `(positions in a block, blocks in a group, groups)`.

    Args:
        features: Features of a key, each of which is multiplied with its value.
    """
    heads, codes, dim = codebook.shape
    value_dim = value.shape[-1] or dim
    floats = heads * (3 * codes + 2 * dim + 2 * (1 + features) * value_dim)
    length = ops.shape(sequence)[1]
    size, blocks, groups = chunk_layout(length, block_length, sequence.shape[0], floats)
    # Of symbolic lengths, as JAX exports them, there is one group.
    known = isinstance(length, int) or keras.backend.backend() != "jax"
    if reduction == "scan" and known:
        return size, 1, blocks * groups
    return size, blocks, groups


@functools.cache
def _causal_step(block_length, reduction):
    def step(carry, x, consts):
        codebook, *mixture = consts
        query, key, value, valid, *index = (by_head(t, block_length) for t in x)
        chosen = _chosen(key, valid, index, codebook, mixture)
        transposed = ops.swapaxes(chosen, -1, -2)
        before, sums = prefix_sums(carry[0], transposed @ value, reduction)
        local = ops.sum(chosen, axis=-2)
        counts_before, counts = prefix_sums(carry[1], local, reduction)
        logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
        if mixture:
            part = _read_mixture(logits, chosen, value, before, counts_before)
        else:
            block = query @ ops.swapaxes(key, -1, -2)
            seen = ops.logical_and(
                lower_triangle(block_length), valid[..., None, :, 0] > 0
            )
            part = _read(logits, before, counts_before, (block, seen, value))
        return (sums, counts), tuple(by_position(t) for t in part)

    return step


def _key_step(carry, x, consts):
    sums, counts = carry
    codebook, *mixture = consts
    key, value, valid, *index = (by_head(t, ops.shape(x[0])[1]) for t in x)
    chosen = _chosen(key, valid, index, codebook, mixture)
    sums = sums + (ops.swapaxes(chosen, -1, -2) @ value)[:, :, 0]
    return (sums, counts + ops.sum(chosen, axis=(2, 3))), ()


def _query_step(carry, x, consts):
    codebook, sums, counts = consts
    query = by_head(x[0], ops.shape(x[0])[1])
    logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
    part = _read(logits, sums[:, :, None], counts[:, :, None])
    return carry, tuple(by_position(t) for t in part)


def _chosen(key, valid, index, codebook, mixture):
    """The share of each code in each key, `(batch, heads, blocks, length, codes)`."""
    if mixture:
        return responsibilities(key, codebook, *mixture) * valid
    return one_hot_codes(index[0], valid, codebook)


def one_hot_codes(index, valid, codebook):
    """1 for the code of each key that is valid, `(..., length, codes)`."""
    codes = ops.arange(codebook.shape[1], dtype="int32")
    return ops.cast(ops.cast(index, "int32") == codes, valid.dtype) * valid


def _read(logits, sums, counts, block=None):
    """The part of the codes, and of the keys of the same block, one by one.

    Args:
        logits: `(batch, heads, blocks, length, codes)`.
        sums, counts: The cache before each block.
        block: Optional `(logits, seen, values)` of the keys of the block.
    """
    full = counts > MIN_COUNT
    means = divided(sums, ops.where(full, counts, 0.0))
    log_counts = ops.log(ops.where(full, counts, 1.0))
    full = full[..., None, :]
    logits = ops.where(full, logits + log_counts[..., None, :], LOG_ZERO)
    scale = ops.max(ops.stop_gradient(logits), axis=-1)
    if block is not None:
        of_keys, seen, values = block
        of_keys = ops.where(seen, of_keys, LOG_ZERO)
        scale = larger(scale, ops.max(ops.stop_gradient(of_keys), axis=-1))
    weights = ops.where(full, ops.exp(logits - scale[..., None]), 0.0)
    total, value = ops.sum(weights, axis=-1), weights @ means
    if block is not None:
        weights = ops.where(seen, ops.exp(of_keys - scale[..., None]), 0.0)
        total, value = total + ops.sum(weights, axis=-1), value + weights @ values
    return value, total, scale


def _read_mixture(logits, chosen, values, sums, counts):
    """As `_read`; each key of the block has a share in every code.

    Its weight is `Σ_c exp(q·c) p(c | key)`, and a code that no key has reached yet
    must not set the scale: the counts are those up to the query.
    """
    lower = ops.cast(lower_triangle(ops.shape(logits)[3]), logits.dtype)
    counts = counts[..., None, :] + lower @ chosen
    full = counts > MIN_COUNT
    with_counts = logits + ops.log(ops.where(full, counts, 1.0))
    with_counts = ops.where(full, with_counts, LOG_ZERO)
    scale = ops.max(ops.stop_gradient(with_counts), axis=-1)
    shifted = ops.where(full, with_counts - scale[..., None], LOG_ZERO)
    total = ops.sum(ops.exp(shifted), axis=-1)
    # Without the counts, at most 1 / count.
    shifted = ops.where(full, logits - scale[..., None], LOG_ZERO)
    weights = ops.exp(shifted)
    of_keys = (weights @ ops.swapaxes(chosen, -1, -2)) * lower
    return weights @ sums + of_keys @ values, total, scale


def prefix_sums(first, local, reduction):
    """Sums before each block, and after the last."""
    blocks = ops.shape(local)[2]
    if isinstance(blocks, int) and blocks == 1:
        return first[:, :, None], first + local[:, :, 0]
    states = ops.concatenate([first[:, :, None], local], axis=2)
    if reduction == "matmul":
        batch, heads, _, *tail = ops.shape(states)
        lower = ops.cast(lower_triangle(blocks + 1), local.dtype)
        flat = ops.reshape(states, (batch, heads, blocks + 1, -1))
        states = ops.reshape(lower @ flat, (batch, heads, blocks + 1, *tail))
    elif keras.backend.backend() == "torch":
        # `ops.cumsum` rounds float64 to float32.
        states = states.cumsum(2)
    else:
        states = ops.cumsum(states, axis=2)
    return states[:, :, :-1], states[:, :, -1]
