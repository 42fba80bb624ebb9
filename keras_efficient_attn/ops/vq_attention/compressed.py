"""Attention to keys through their codes, in linear time.

A cache holds, per code, the number of its keys and the sum of their values. Query `t`
weights code `c` by `exp(q·c + log count)` and reads the mean of its values. Keys of the
current block, which the cache does not hold yet, are weighted one by one.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, pick, shape_of
from keras_efficient_attn.ops.common.block_softmax import fused_module
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    columns,
    lower_triangle,
    pad_to,
)
from keras_efficient_attn.ops.common.numerics import max_along
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.vq_attention.code_sums import (
    MIN_COUNT,
    prefix_sums,
    sums_and_counts,
)
from keras_efficient_attn.ops.vq_attention.codebook import responsibilities
from keras_efficient_attn.ops.vq_attention.hard_codes import hard_step

if BACKEND == "torch":
    from keras_efficient_attn.ops.vq_attention import compressed_torch


def causal_compressed_attention(query, keys, codebook, cache, config):
    """Partial softmax of query `t` over the keys `0..t`, through their codes.

    Args:
        query: `(batch, length, heads, dim)`.
        keys: `Keys` from `far_keys`; values of missing keys are zero.
        codebook: `Codebook`.
        cache: `(sum, count)` of shapes `(batch, heads, codes, value_dim)` and
            `(batch, heads, codes)`.
        config: `VQConfig`.

    Returns:
        `(part, cache)`: values, totals and log scales for `online_softmax.merge`, and
        the cache after the last position.
    """
    codes = codebook.codes
    cut = (keys.value, codes, config.block_size(codes.shape[1]))
    size, blocks, groups = layout(query, *cut, block_sizes().codes_in_turn)
    if keys.index is not None and fused_module(query) is not None:
        return compressed_torch.causal_hard_attention(query, keys, codes, cache, size)
    xs = (query, *key_columns(keys))
    xs = tuple(pad_to(x, groups * blocks * size) for x in xs)
    consts = _weights(codebook)
    if keys.index is None:
        step, gradient = _soft_step(size), None
    else:
        step, gradient = hard_step(size)
    cache, part = recompute_scan(step, cache, xs, consts, gradient, num_steps=groups)
    return tuple(y[:, : shape_of(query)[1]] for y in part), cache


def full_compressed_attention(query, keys, codebook, cache, config):
    """`causal_compressed_attention` without causality: queries see every valid key.

    Queries and keys may differ in length.
    """
    codes = codebook.codes
    cut = (keys.value, codes, config.block_size(codes.shape[1]), False)
    size, blocks, groups = layout(keys.value, *cut)
    xs = tuple(pad_to(x, groups * blocks * size) for x in key_columns(keys))
    consts = _weights(codebook)
    cache, _ = recompute_scan(_key_step, cache, xs, consts, num_steps=groups)

    size, blocks, groups = layout(query, *cut)
    xs, consts = (pad_to(query, groups * blocks * size),), (codes, *cache)
    _, part = recompute_scan(_query_step, (), xs, consts, num_steps=groups)
    return tuple(y[:, : shape_of(query)[1]] for y in part), cache


def layout(sequence, value, codes, block_length, in_turn, features=0):
    """The layout of a sequence: `(positions per block, blocks per group, groups)`.

    Args:
        in_turn: Whether each group is a single block.
        features: Number of features of a key, each multiplied with its value.
    """
    heads, num_codes, dim = codes.shape
    value_dim = value.shape[-1] or dim
    floats = heads * (3 * num_codes + 2 * dim + 2 * (1 + features) * value_dim)
    length = shape_of(sequence)[1]
    size, blocks, groups = chunk_layout(length, block_length, sequence.shape[0], floats)
    # Symbolic lengths, as JAX exports them, make one group.
    known = isinstance(length, int) or pick(True, jax=False)
    if in_turn and known:
        return size, 1, blocks * groups
    return size, blocks, groups


def key_columns(keys):
    """The tensors that `Keys` have, for a scan: `(batch, length, heads, ...)`."""
    index = keys.index
    if index is not None:
        index = columns(ops.cast(index, keys.value.dtype))
    tensors = keys.key, keys.value, columns(keys.valid), index
    return tuple(t for t in tensors if t is not None)


def _weights(codebook):
    return tuple(t for t in codebook if t is not None)


@functools.cache
def _soft_step(block_length):
    def step(carry, x, consts):
        codebook, *mixture = consts
        query, key, value, valid = (by_head(t, block_length) for t in x)
        chosen = responsibilities(key, codebook, *mixture) * valid
        before, sums = prefix_sums(carry[0], ops.swapaxes(chosen, -1, -2) @ value)
        counts_before, counts = prefix_sums(carry[1], ops.sum(chosen, axis=-2))
        logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
        part = _read_mixture(logits, chosen, value, before, counts_before)
        return (sums, counts), tuple(by_position(t) for t in part)

    return step


def _key_step(carry, x, consts):
    codebook, *mixture = consts
    tensors = [by_head(t, shape_of(x[0])[1]) for t in x]
    if mixture:
        key, value, valid = tensors
        chosen = responsibilities(key, codebook, *mixture) * valid
        new = ops.swapaxes(chosen, -1, -2) @ value, ops.sum(chosen, axis=-2)
    else:
        new = sums_and_counts(*tensors, codebook.shape[1])
    return tuple(old + t[:, :, 0] for old, t in zip(carry, new, strict=True)), ()


def _query_step(carry, x, consts):
    codebook, sums, counts = consts
    query = by_head(x[0], shape_of(x[0])[1])
    logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
    part = _read(logits, sums[:, :, None], counts[:, :, None])
    return carry, tuple(by_position(t) for t in part)


def _read(logits, sums, counts):
    """Partial softmax over the codes.

    Args:
        logits: `(batch, heads, blocks, length, codes)`.
        sums, counts: The cache before each block.
    """
    full = counts > MIN_COUNT
    means = divide(sums, ops.where(full, counts, 0.0))
    log_counts = ops.log(ops.where(full, counts, 1.0))
    full = full[..., None, :]
    logits = ops.where(full, logits + log_counts[..., None, :], LOG_ZERO)
    scale = max_along(ops.stop_gradient(logits), axis=-1)
    weights = ops.where(full, ops.exp(logits - scale[..., None]), 0.0)
    return weights @ means, ops.sum(weights, axis=-1), scale


def _read_mixture(logits, chosen, values, sums, counts):
    """`_read` for soft codes: each key of the block has a share in every code.

    Its weight is `Σ_c exp(q·c) p(c | key)`. A code without keys so far must not set the
    scale, so the counts are those up to the query.
    """
    lower = ops.cast(lower_triangle(shape_of(logits)[3]), logits.dtype)
    counts = counts[..., None, :] + lower @ chosen
    full = counts > MIN_COUNT
    with_counts = logits + ops.log(ops.where(full, counts, 1.0))
    with_counts = ops.where(full, with_counts, LOG_ZERO)
    scale = max_along(ops.stop_gradient(with_counts), axis=-1)
    shifted = ops.where(full, with_counts - scale[..., None], LOG_ZERO)
    total = ops.sum(ops.exp(shifted), axis=-1)
    # Excluding the counts, at most 1 / count.
    shifted = ops.where(full, logits - scale[..., None], LOG_ZERO)
    weights = ops.exp(shifted)
    key_weights = (weights @ ops.swapaxes(chosen, -1, -2)) * lower
    return weights @ sums + key_weights @ values, total, scale
