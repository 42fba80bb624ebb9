"""Linear attention over chunks: matmuls in a chunk, a running state between them.

Keys enter the state relative to a running maximum `M` of their log weights:
`state = Σ e^(l[s] − M) φk[s]ᵀ [v[s], 1]`. What a query sees is brought to a maximum
over the keys it may see, and to no other: the scale cancels in the division, so no
feature needs an epsilon, nothing overflows, and the past is exactly independent of
the future.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.chunking import (
    by_head,
    by_position,
    chunk_layout,
    join_groups,
    lower_triangle,
    split_groups,
)
from keras_efficient_attn.ops.partial_attention import (
    LOG_ZERO,
    finish,
    larger,
    with_ones,
)
from keras_efficient_attn.ops.recompute import recompute_scan


def causal_linear_attention(
    query,
    key,
    value,
    valid,
    key_log_weight,
    state,
    query_map,
    key_map,
    map_weights,
    chunk_size,
    output,
):
    """Causal attention over `(batch, length, heads, dim)`.

    Args:
        query, key: What the maps read, equally long.
        value: `(batch, length, heads, value_dim)`, zero where not valid.
        valid: `(batch, length)`, 1 for keys that exist and 0 for others.
        key_log_weight: `(batch, length, heads)`, or `None`.
        state: `(sums, log_scale)` of shapes `(batch, heads, features,
            value_dim + 1)` and `(batch, heads)`.
        query_map, key_map: `(x, *map_weights) -> (features, log_scale or None)`.
        map_weights: Tuple of tensors.
        chunk_size: Positions in a chunk.
        output: `"normalized"`, `"sum"`, or `"partial"` for `(numerator, log_scale)`.

    Returns:
        `(outputs, state)`; `outputs` is a tuple of tensors, batch and length first.
    """
    length = ops.shape(query)[1]
    heads, features = state[0].shape[1:3]
    floats = heads * (2 * features + 3 * (value.shape[-1] or features))
    size, chunks, groups = chunk_layout(length, chunk_size, query.shape[0], floats)
    xs = (query, key, value, valid)
    if key_log_weight is not None:
        xs += (key_log_weight,)
    xs = tuple(split_groups(x, groups, chunks * size) for x in xs)
    step = _causal_step(query_map, key_map, size, output)
    state, outputs = recompute_scan(step, state, xs, map_weights)
    return tuple(join_groups(y, length) for y in outputs), state


def full_linear_attention(
    query,
    key,
    value,
    valid,
    key_log_weight,
    state,
    query_map,
    key_map,
    map_weights,
    chunk_size,
    output,
):
    """As `causal_linear_attention`, each query attending to every valid key."""
    heads, features = state[0].shape[1:3]
    floats = heads * (features + 2 * (value.shape[-1] or features))

    xs = (key, value, valid)
    if key_log_weight is not None:
        xs += (key_log_weight,)
    size, chunks, groups = chunk_layout(
        ops.shape(key)[1], chunk_size, key.shape[0], floats
    )
    xs = tuple(split_groups(x, groups, chunks * size) for x in xs)
    state, _ = recompute_scan(_key_step(key_map), state, xs, map_weights)

    length = ops.shape(query)[1]
    size, chunks, groups = chunk_layout(length, chunk_size, query.shape[0], floats)
    xs = (split_groups(query, groups, chunks * size),)
    step = _query_step(query_map, output)
    _, outputs = recompute_scan(step, (), xs, (*state, *map_weights))
    return tuple(join_groups(y, length) for y in outputs), state


@functools.cache
def _causal_step(query_map, key_map, chunk_size, output):
    """The step of the scan, one object per configuration (JAX caches by identity)."""

    def step(carry, x, map_weights):
        sums, log_scale = carry
        query, key, value, valid, *explicit = x
        query, key, value, valid, *explicit = (
            by_head(t, chunk_size)
            for t in (query, key, value, valid[..., None], *explicit)
        )
        query, query_log_scale = query_map(query, *map_weights)
        key, key_log_weight = key_map(key, *map_weights)
        key_log_weight = _total_log_weight(key_log_weight, explicit)
        if explicit:
            valid = ops.where(explicit[0] > LOG_ZERO, valid, 0.0)
        value = with_ones(value, valid)
        scores = query @ ops.swapaxes(key, -1, -2)
        if key_log_weight is None:
            scores = ops.tril(scores)
            local = ops.swapaxes(key, -1, -2) @ value
            before, sums = _prefix_sums(sums, local)
            numerator = scores @ value + query @ before
            scale = None
        else:
            key_log_weight = ops.where(valid > 0, key_log_weight, LOG_ZERO)
            constant = ops.stop_gradient(key_log_weight)
            chunk_max = ops.max(constant, axis=-1)
            # Of the state, and of each query: what it may see, and no more.
            state_max, weights = _prefix_weights(log_scale, chunk_max)
            lower = lower_triangle(chunk_size)
            seen = ops.where(lower, constant[..., None, :], LOG_ZERO)
            scale = larger(ops.max(seen, axis=-1), state_max[..., :-1, None])
            shifted = key_log_weight[..., None, :] - scale[..., None]
            # Above the diagonal the shift may be large: cut before the exponential.
            shifted = ops.where(lower, shifted, LOG_ZERO)
            scores = scores * ops.where(lower, ops.exp(shifted), 0.0)
            scaled = ops.exp(key_log_weight - chunk_max[..., None])
            local = ops.swapaxes(key * scaled[..., None], -1, -2) @ value
            before, sums = _prefix_sums(sums, local, weights)
            rescale = ops.exp(state_max[..., :-1, None] - scale)[..., None]
            numerator = scores @ value + rescale * (query @ before)
            log_scale = state_max[..., -1]
        outputs = _outputs(numerator, scale, query_log_scale, output)
        return (sums, log_scale), tuple(by_position(t) for t in outputs)

    return step


def _prefix_weights(log_scale, chunk_max):
    """Running maxima, and the weights that bring earlier chunks to them.

    Returns `(batch, heads, chunks + 1)` maxima over the state and the chunks before
    each chunk (the last: after all), and `(batch, heads, chunks + 1, chunks + 1)`
    weights, lower triangular, whose column 0 is the state's.
    """
    maxima = ops.concatenate([log_scale[..., None], chunk_max], axis=-1)
    lower = lower_triangle(ops.shape(maxima)[-1])
    seen = ops.where(lower, maxima[..., None, :], LOG_ZERO)
    running = ops.max(seen, axis=-1, initial=LOG_ZERO)
    return running, ops.where(lower, ops.exp(seen - running[..., None]), 0.0)


def _prefix_sums(sums, local, weights=None):
    """States before each chunk, and the state after the last."""
    batch, heads, chunks, features, columns = ops.shape(local)
    states = ops.concatenate([sums[:, :, None], local], axis=2)
    if weights is None:
        weights = ops.cast(lower_triangle(chunks + 1), local.dtype)
    states = ops.reshape(states, (batch, heads, chunks + 1, features * columns))
    states = ops.reshape(
        weights @ states, (batch, heads, chunks + 1, features, columns)
    )
    return states[:, :, :-1], states[:, :, -1]


@functools.cache
def _key_step(key_map):
    """Adds a group of keys to the state."""

    def step(carry, x, map_weights):
        sums, log_scale = carry
        group = ops.shape(x[0])[1]
        key, value, valid, *explicit = (
            by_head(t, group) for t in (*x[:2], x[2][..., None], *x[3:])
        )
        key, key_log_weight = key_map(key, *map_weights)
        key_log_weight = _total_log_weight(key_log_weight, explicit)
        if explicit:
            valid = ops.where(explicit[0] > LOG_ZERO, valid, 0.0)
        value = with_ones(value, valid)
        if key_log_weight is None:
            log_scale = ops.zeros_like(log_scale)
        else:
            key_log_weight = ops.where(valid > 0, key_log_weight, LOG_ZERO)
            constant = ops.stop_gradient(key_log_weight)
            largest = ops.max(constant, axis=(2, 3), initial=LOG_ZERO)
            largest = larger(log_scale, largest)
            scaled = ops.exp(key_log_weight - largest[..., None, None])
            key = key * scaled[..., None]
            sums = sums * ops.exp(log_scale - largest)[..., None, None]
            log_scale = largest
        return (
            sums + (ops.swapaxes(key, -1, -2) @ value)[:, :, 0],
            log_scale,
        ), ()

    return step


@functools.cache
def _query_step(query_map, output):
    """Reads a group of queries' outputs from the state."""

    def step(carry, x, consts):
        sums, log_scale, *map_weights = consts
        query = by_head(x[0], ops.shape(x[0])[1])
        query, query_log_scale = query_map(query, *map_weights)
        numerator = query @ sums[:, :, None]
        scale = ops.broadcast_to(log_scale[..., None, None], ops.shape(numerator)[:-1])
        outputs = _outputs(numerator, scale, query_log_scale, output)
        return carry, tuple(by_position(t) for t in outputs)

    return step


def _total_log_weight(mapped, explicit):
    """The feature map's log weight and the caller's, either of which may be absent."""
    if not explicit:
        return mapped
    return explicit[0] if mapped is None else mapped + explicit[0]


def _outputs(numerator, log_scale, query_log_scale, output):
    if output == "normalized":
        return (finish(numerator),)
    if log_scale is None:
        log_scale = ops.zeros_like(numerator[..., 0])
    if query_log_scale is not None:
        log_scale = log_scale + query_log_scale
    if output == "sum":
        return (finish(numerator, log_scale, normalize=False),)
    return numerator, log_scale
