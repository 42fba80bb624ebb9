"""Attention to keys expanded around their codes to second order, in linear time.

The weight of a key with code `c` and residual `δ = key − c` is
`exp(q·c) (1 + x + x²/2 + y/2)`, where `x` is the product of `q` and `δ` in the first
`rank` coordinates, and `y = Σ q² mean(δ²)` over the others, with the mean over the
code's keys. `1 + x + x²/2` is a product of Taylor features of `q` and of `δ`.

A cache holds, per code: the sums of the features times the values, the sums of the
features, and, unless all coordinates are expanded, the sums of the squares in the
others. The first feature is the constant 1, so that the first sums are the sum of the
values and the number of keys.
"""

import functools
import math

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    lower_triangle,
    sizes,
)
from keras_efficient_attn.ops.common.constants import constant
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.vq_attention.blocks import (
    MIN_COUNT,
    key_columns,
    one_hot_codes,
    prefix_sums,
    sum_by_code,
    weigh,
)


def attention_in_a_block(query, keys, codebook, config, causal):
    """Partial softmax over all keys, causal or not, without a cache.

    Time and memory grow with the square of the length, but not with the number of
    features.
    """
    codes = codebook.codes
    step = _block_step(config.expanded_dims(codes.shape[-1]), causal)
    xs = (query, *key_columns(keys))
    return recompute_scan(step, (), xs, (codes,), num_steps=1)[1]


@functools.cache
def causal_step(block_length, rank):
    def step(carry, x, consts):
        (codebook,) = consts
        query, residual, value, valid, index = (by_head(t, block_length) for t in x)
        chosen = one_hot_codes(index, valid, codebook.shape[1])
        local = feature_sums(chosen, index, residual, value, rank)
        before, after = zip(*map(prefix_sums, carry, local), strict=True)
        part = read(query, codebook, before, rank, (chosen, residual, value))
        return after, tuple(by_position(t) for t in part)

    return step


@functools.cache
def key_step(rank):
    def step(carry, x, consts):
        (codebook,) = consts
        residual, value, valid, index = (by_head(t, shape_of(x[0])[1]) for t in x)
        chosen = one_hot_codes(index, valid, codebook.shape[1])
        local = feature_sums(chosen, index, residual, value, rank)
        return tuple(a + b[:, :, 0] for a, b in zip(carry, local, strict=True)), ()

    return step


@functools.cache
def query_step(rank):
    def step(carry, x, consts):
        codebook, *state = consts
        query = by_head(x[0], shape_of(x[0])[1])
        state = tuple(t[:, :, None] for t in state)
        part = read(query, codebook, state, rank)
        return carry, tuple(by_position(t) for t in part)

    return step


@functools.cache
def _block_step(rank, causal):
    def step(carry, x, consts):
        (codebook,) = consts
        query, residual, value, valid, index = (by_head(t, shape_of(t)[1]) for t in x)
        chosen = one_hot_codes(index, valid, codebook.shape[1])
        block, seen = (chosen, residual, value), None
        if not causal:
            seen = ops.ones((shape_of(query)[3], shape_of(value)[3]), query.dtype)
        part = read(query, codebook, None, rank, block, seen)
        return carry, tuple(by_position(t) for t in part)

    return step


def _features(x, rank):
    """Features whose dot product is `1 + s + s²/2`, the constant 1 first.

    `s` is the dot product of the first `rank` entries, and the features are the
    products of pairs of `(1, x)`.
    """
    x = ops.concatenate([ops.ones_like(x[..., :1]), x[..., :rank]], axis=-1)
    # Products with matrices that select entries: XLA would compute pairs from gathered
    # or reshaped entries again for each entry of the values they are multiplied with.
    first = constant(_first_of_pairs, rank + 1, dtype=x.dtype)
    second = constant(_second_of_pairs, rank + 1, dtype=x.dtype)
    return (x @ first) * (x @ second)


def _first_of_pairs(size):
    return np.eye(size)[:, np.triu_indices(size)[0]]


def _second_of_pairs(size):
    first, second = np.triu_indices(size)
    is_square = (first == second) & (first > 0)
    return np.eye(size)[:, second] * np.where(is_square, math.sqrt(0.5), 1.0)


def feature_sums(chosen, index, residual, value, rank):
    """The sums over each block's keys, to add to the cache.

    Args:
        chosen: `(batch, heads, blocks, length, codes)`, from `one_hot_codes`.
        index: `(batch, heads, blocks, length, 1)`, the codes of the keys.
        residual: `(batch, heads, blocks, length, dim)`.
        value: `(batch, heads, blocks, length, value_dim)`; zero for missing keys.
        rank: Number of expanded coordinates of the residuals.
    """
    by_code = ops.swapaxes(chosen, -1, -2)
    features = _features(residual, rank)
    products = _flat(features[..., None] * value[..., None, :])
    sums = sum_by_code(products, index, chosen.shape[-1])
    shape = (*sizes(by_code)[:-1], features.shape[-1], shape_of(value)[-1])
    sums = (ops.reshape(sums, shape), by_code @ features)
    if rank < residual.shape[-1]:
        sums += (by_code @ ops.square(residual[..., rank:]),)
    return sums


def read(query, codebook, cache, rank, block=None, seen=None):
    """Partial softmax over the keys in the cache and in the same block.

    Args:
        query: `(batch, heads, blocks, length, dim)`.
        cache: The cache before each block, or `None` for an empty one.
        block: Optional `(chosen, residual, value)` of the keys of the block.
        seen: 1 for keys of the block that a query sees and 0 for others. Defaults to
            those up to its own.
    """
    logits = query @ ops.swapaxes(codebook[:, None], -1, -2)
    numbers = 0.0
    if cache is not None:
        sums, counts, *squares = cache
        numbers = counts[..., None, :, 0]
    if block is not None:
        # Up to the query: a code without keys so far must not set the scale.
        chosen, residual, value = block
        if seen is None:
            seen = ops.cast(lower_triangle(shape_of(query)[3]), query.dtype)
        numbers = numbers + seen @ chosen
    # Of one key per code, at the code itself.
    weights, _, scale = weigh(logits, numbers)

    output = total = 0.0
    if cache is not None:
        features = _features(query, rank)
        by_feature = weights @ _flat(sums)
        shape = (*sizes(features), shape_of(sums)[-1])
        output = (features[..., None, :] @ ops.reshape(by_feature, shape))[..., 0, :]
        total = ops.sum(features * (weights @ counts), axis=-1)
    if block is not None:
        by_code = ops.swapaxes(chosen, -1, -2)
        x = query[..., :rank] @ ops.swapaxes(residual[..., :rank], -1, -2)
        key_weights = (weights @ by_code) * seen * (1.0 + x + 0.5 * ops.square(x))
        output = output + key_weights @ value
        total = total + ops.sum(key_weights, axis=-1)
    if rank < query.shape[-1]:
        halves = 0.5 * ops.square(query[..., rank:])
        spread = 0.0
        if cache is not None:
            spread = halves @ ops.swapaxes(squares[0], -1, -2)
        if block is not None:
            pairs = halves @ ops.swapaxes(ops.square(residual[..., rank:]), -1, -2)
            spread = spread + (pairs * seen) @ chosen
        spread = weights * spread
        total = total + ops.sum(spread, axis=-1)
        # Use the mean for each key of a code.
        spread = spread / ops.where(numbers > MIN_COUNT, numbers, 1.0)
        if cache is not None:
            output = output + spread @ sums[..., 0, :]
        if block is not None:
            output = output + ((spread @ by_code) * seen) @ value
    return output, total, scale


def _flat(x):
    """The last two axes as one."""
    *rest, first, second = sizes(x)
    return ops.reshape(x, (*rest, first * second))
