"""Linear attention over chunks: matmuls within a chunk, a running state between chunks.

Keys enter the state relative to a running maximum `M` of their log weights:
`sum = Σ e^(l[s] − M) φ(k[s])ᵀ v[s]` and `normalizer = Σ e^(l[s] − M) φ(k[s])`.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import (
    BACKEND,
    in_function_transform,
    shape_of,
)
from keras_efficient_attn.ops.common.chunking import (
    by_position,
    chunk_layout,
    columns,
    pad_to,
)
from keras_efficient_attn.ops.common.documents import ChunkMasks
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    larger,
    max_along,
    where,
)
from keras_efficient_attn.ops.common.online_softmax import (
    LOG_ZERO,
    finish,
    sum_of_scales,
)
from keras_efficient_attn.ops.common.scan import recompute_scan, vector_jacobian_product
from keras_efficient_attn.ops.linear_attention import causal_chunks

if BACKEND == "torch":
    from keras_efficient_attn.ops.linear_attention.causal_chunks_torch import (
        Chunks,
        by_head,
    )
else:
    from keras_efficient_attn.ops.common.chunking import by_head
    from keras_efficient_attn.ops.linear_attention.causal_chunks import Chunks


def causal_linear_attention(tensors, state, map_weights, config, position=None):
    """Causal attention over `(batch, length, heads, dim)`.

    Args:
        tensors: `(query, key, value, valid, key_log_weight)`. Queries and keys, the
            inputs of the maps, are of equal length; float16 and bfloat16 are cast to
            the state's dtype step by step. Values `(batch, length, heads, value_dim)`
            are zero where not valid; `valid` is `(batch, length)`, 1 for keys that
            exist and 0 for others, or `None`; log weights are `(batch, length, heads)`,
            or `None`.
        state: `(sum, normalizer, log_scale)` of shapes `(batch, heads, features,
            value_dim)`, `(batch, heads, features)` and `(batch, heads)`.
        map_weights: Tuple of tensors.
        config: `LinearAttentionConfig`.
        position: How many keys before its own a query sees, as for `ChunkMasks.of`.
            Defaults to `None`: all, and those of the state.

    Returns:
        `(outputs, state)`; `outputs` is a tuple of tensors, batch and length first.
    """
    query, key, value, valid, key_log_weight = tensors
    length = shape_of(query)[1]
    heads, features = state[0].shape[1:3]
    floats = heads * (2 * features + 3 * (value.shape[-1] or features))
    size, chunks, groups = chunk_layout(
        length, config.chunk_length, query.shape[0], floats
    )
    whole = _divides(groups * chunks * size, length)
    if valid is None and not whole:
        valid = ops.ones(shape_of(key)[:2], state[0].dtype)
    xs = [query, key, value]
    xs += [columns(t) for t in (valid, key_log_weight) if t is not None]
    if position is not None:
        xs.append(position)
    if not whole:
        xs = [pad_to(x, groups * chunks * size) for x in xs]
    by_document = position is not None
    step, gradient = _causal_step(config, size, valid is not None, by_document)
    state, outputs = recompute_scan(
        step, state, tuple(xs), map_weights, gradient, groups
    )
    return tuple(y[:, :length] for y in outputs), state


def full_linear_attention(tensors, state, map_weights, config):
    """`causal_linear_attention` without causality: queries see every valid key."""
    query, key, value, valid, key_log_weight = tensors
    heads, features = state[0].shape[1:3]
    floats = heads * (features + 2 * (value.shape[-1] or features))
    size, chunks, groups = chunk_layout(
        shape_of(key)[1], config.chunk_length, key.shape[0], floats
    )
    if valid is None and not _divides(groups * chunks * size, shape_of(key)[1]):
        valid = ops.ones(shape_of(key)[:2], state[0].dtype)
    xs = [key, value]
    xs += [columns(t) for t in (valid, key_log_weight) if t is not None]
    xs = tuple(pad_to(x, groups * chunks * size) for x in xs)
    step = _key_step(config.key_map, valid is not None)
    state, _ = recompute_scan(step, state, xs, map_weights, num_steps=groups)

    length = shape_of(query)[1]
    size, chunks, groups = chunk_layout(
        length, config.chunk_length, query.shape[0], floats
    )
    xs = (pad_to(query, groups * chunks * size),)
    step, consts = _query_step(config.query_map, config.output), (*state, *map_weights)
    _, outputs = recompute_scan(step, (), xs, consts, num_steps=groups)
    return tuple(y[:, :length] for y in outputs), state


def _divides(padded, length):
    """Whether a length is known and needs no padding."""
    return isinstance(padded, int) and isinstance(length, int) and padded == length


def weigh_keys(key, log_weight, rest, masked):
    """Features of keys, zero for missing keys, and log weights or `None`.

    Args:
        key: Features `(batch, heads, chunks, chunk_size, features)`.
        log_weight: Their log scales, one axis less, or `None`.
        rest: Further tensors of the keys, with a last axis of 1: `valid` if `masked`,
            then optionally a log weight.
        masked: Boolean.
    """
    if not rest:
        return key, log_weight
    rest = [t[..., 0] for t in rest]
    valid = rest.pop(0) if masked else None
    if rest:
        (explicit,) = rest
        seen = ops.cast(explicit > LOG_ZERO, key.dtype)
        valid = seen if valid is None else valid * seen
        log_weight = sum_of_scales(log_weight, explicit)
    if valid is not None:
        key = key * valid[..., None]
        if log_weight is not None:
            log_weight = where(valid > 0, log_weight, LOG_ZERO)
    return key, log_weight


def _chunks_class():
    """The class of chunks; without sums in place if PyTorch differentiates them."""
    return causal_chunks.Chunks if in_function_transform() else Chunks


# Bounded: it holds functions that users make.
@functools.lru_cache(256)
def _causal_step(config, chunk_size, masked, by_document):
    """`(step, gradient)` for `recompute_scan`.

    The carry is `(sum, normalizer, log_scale)`; `x` is `(query, key, value)`, the
    further inputs of `weigh_keys`, and `by_document` the position that
    `ChunkMasks.of` takes; the constants are the maps' weights. `log_scale` has no
    gradient.

    Args:
        config: `LinearAttentionConfig`.
        chunk_size: Positions per chunk.
        masked: Whether `x` includes a key mask.
        by_document: Whether queries see the keys of their own documents only.
    """

    def prepare(x, map_weights):
        dtype = accumulator_dtype(*x)
        query, key, value, *rest = (by_head(ops.cast(t, dtype), chunk_size) for t in x)
        query, query_log_scale = config.query_map(query, *map_weights)
        key, log_weight = weigh_keys(*config.key_map(key, *map_weights), rest, masked)
        return query, key, value, log_weight, query_log_scale

    def step(carry, x, map_weights):
        masks = None
        if by_document:
            x, masks = x[:-1], ChunkMasks.of(x[-1], chunk_size)
        chunks = _chunks_class()(carry, *prepare(x, map_weights), masks)
        return chunks.carry, chunks.outputs(config.output)

    def gradient(carry, x, map_weights, y, carry_gradient, y_gradient):
        own, masks = x, None
        if by_document:
            own, masks = x[:-1], ChunkMasks.of(x[-1], chunk_size)
        prepared, pull = vector_jacobian_product(prepare, (own, map_weights))
        chunks = _chunks_class()(carry, *prepared, masks)
        grad_carry, *grad_prepared = chunks.gradient(
            y, y_gradient, carry_gradient, config.output
        )
        grad_x, grad_weights = pull(grad_prepared)
        # Positions are integers.
        grad_x = *grad_x, *map(ops.zeros_like, x[len(own) :])
        return grad_carry, grad_x, grad_weights

    return step, gradient


# Bounded: it holds functions that users make.
@functools.lru_cache(256)
def _key_step(key_map, masked):
    """Adds a group of keys to the state."""

    def step(carry, x, map_weights):
        sums, normalizer, log_scale = carry
        group = shape_of(x[0])[1]
        key, value, *rest = (by_head(ops.cast(t, sums.dtype), group) for t in x)
        key, log_weight = weigh_keys(*key_map(key, *map_weights), rest, masked)
        if log_weight is None:
            log_scale = ops.zeros_like(log_scale)
        else:
            constant = ops.stop_gradient(log_weight)
            largest = max_along(constant, axis=(2, 3), initial=LOG_ZERO)
            largest = larger(log_scale, largest)
            key = key * ops.exp(log_weight - largest[..., None, None])[..., None]
            rescale = ops.exp(log_scale - largest)[..., None]
            normalizer = normalizer * rescale
            sums = sums * rescale[..., None]
            log_scale = largest
        sums = sums + (ops.swapaxes(key, -1, -2) @ value)[:, :, 0]
        return (sums, normalizer + ops.sum(key, axis=(2, 3)), log_scale), ()

    return step


# Bounded: it holds functions that users make.
@functools.lru_cache(256)
def _query_step(query_map, output):
    """Reads a group of queries' outputs from the state."""

    def step(carry, x, consts):
        sums, normalizer, log_scale, *map_weights = consts
        query = by_head(ops.cast(x[0], sums.dtype), shape_of(x[0])[1])
        query, query_log_scale = query_map(query, *map_weights)
        values = query @ sums[:, :, None]
        totals = (query @ normalizer[:, :, None, :, None])[..., 0]
        scale = ops.broadcast_to(log_scale[..., None, None], shape_of(totals))
        if query_log_scale is not None:
            scale = scale + query_log_scale
        if output == "partial":
            outputs = values, totals, scale
        else:
            outputs = (finish(values, totals, scale, output == "normalized"),)
        return carry, tuple(by_position(t) for t in outputs)

    return step
