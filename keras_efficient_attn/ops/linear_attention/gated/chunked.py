"""Linear attention with a decay and a correction, over chunks.

In a chunk, with `G` the sum of the log decays from its start up to and including a
position, and S the state before the chunk:

```
P[t, s] = Σ_i φ(k[t])_i φ(k[s])_i exp(G[t]_i − G[s]_i)             s < t
(I + diag(β) P) [U, W] = diag(β) [V, φ(K) ∘ exp(G)]
V'      = U − W S
Y       = (φ(Q) ∘ exp(G)) S + A V'
S'      = diag(exp(G[end])) S + (φ(K) ∘ exp(G[end] − G))ᵀ V'
```

where A is as P, with queries for the keys `t`, and `s ≤ t`. Without `β`, V' is V. Only
the last line goes from chunk to chunk; all else is one batch of products.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    pad_to,
)
from keras_efficient_attn.ops.common.online_softmax import divided
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.common.triangular import solve_unit_lower
from keras_efficient_attn.ops.linear_attention.gated.products import (
    decay_from_start,
    decay_to_end,
    decayed_products,
)


def chunked_gated_attention(tensors, rates, state, map_weights, config):
    """Causal attention over `(batch, length, heads, dim)`.

    Args:
        tensors: `(query, key, value)`, equally long, zero for keys that do not exist.
        rates: `(log_decay, beta)`, each `None` or `(batch, length, heads, 1)`; decays
            may have as many entries as features. Zero for keys that do not exist.
        state: `(batch, heads, features, value_dim)`, and with normalized outputs one
            more column for the sum of the weights.
        map_weights: Tuple of tensors.
        config: `LinearAttentionConfig`.

    Returns:
        `(output, state)`.
    """
    query, key, value = tensors
    length = shape_of(query)[1]
    heads, features, value_dim = state.shape[1:]
    # What a position takes in the step: rows of matrices, features, values.
    floats = 4 * config.chunk_length + 6 * features + 5 * (value_dim or features)
    if rates[0] is not None and rates[0].shape[-1] != 1:
        floats += 16 * features
    floats *= heads
    size, chunks, groups = chunk_layout(
        length, config.chunk_length, query.shape[0], floats
    )
    xs = (query, key, value, *(rate for rate in rates if rate is not None))
    xs = tuple(pad_to(x, groups * chunks * size) for x in xs)
    has_decay, has_beta = (rate is not None for rate in rates)
    step = _group_step(config, size, has_decay, has_beta)
    (state,), (output,) = recompute_scan(
        step, (state,), xs, map_weights, num_steps=groups
    )
    return output[:, :length], state


# Bounded: it holds functions that users make.
@functools.lru_cache(256)
def _group_step(config, size, has_decay, has_beta):
    normalized = config.output == "normalized"

    def step(carry, x, map_weights):
        (state,) = carry
        query, key, value, *rates = (by_head(ops.cast(t, state.dtype), size) for t in x)
        query, key = mapped(config, query, key, map_weights)
        if normalized:
            value = with_ones(value)
        log_decay = rates.pop(0) if has_decay else None
        lefts = [query, key] if has_beta else [query]
        scores, *overlaps = decayed_products(lefts, key, log_decay)
        far_query, far_key, reading_key, read, end = query, key, key, None, None
        if has_decay:
            factor = ops.exp(decay_from_start(log_decay))
            far_query, reading_key = query * factor, key * factor
            far_key = key * ops.exp(decay_to_end(log_decay))
            end = ops.swapaxes(factor[:, :, :, -1:], -1, -2)
        if has_beta:
            value, read = _corrected(reading_key, value, *overlaps, *rates)
        before, values, state = _states(state, far_key, value, read, end)
        output = far_query @ before + scores @ values
        if normalized:
            output = divided(output[..., :-1], output[..., -1])
        return (state,), (by_position(output),)

    return step


def mapped(config, query, key, map_weights):
    """Features of queries and keys.

    Raises:
        ValueError: For maps whose features have a log scale.
    """
    query, query_log_scale = config.query_map(query, *map_weights)
    key, log_scale = config.key_map(key, *map_weights)
    if query_log_scale is not None or log_scale is not None:
        raise ValueError(
            "`log_decay` and `beta` take feature maps without a log scale, such as "
            f"'elu'. Received: {config.key_map}"
        )
    return query, key


def with_ones(value):
    """Values with one more entry, 1: its sums are those of the weights."""
    return ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)


def _corrected(key, value, overlaps, beta):
    """`(U, W)` of the formulae: values, and keys as they read the state.

    Args:
        key: Keys that decayed from the chunk's start, `(..., chunk_size, features)`.
        value: `(..., chunk_size, value_dim)`.
        overlaps: P, and what is on its diagonal.
        beta: `(..., chunk_size, 1)`.
    """
    weights = beta * ops.tril(overlaps, k=-1)
    right = beta * ops.concatenate([key, value], axis=-1)
    solved = solve_unit_lower(weights, right)
    return solved[..., key.shape[-1] :], solved[..., : key.shape[-1]]


def _states(state, key, value, read, end):
    """States before each chunk, what each adds to them, and the state after the last.

    Args:
        state: `(batch, heads, features, value_dim)`.
        key, value: Keys as they enter the state, and their values,
            `(batch, heads, chunks, chunk_size, ...)`.
        read: Keys as they read the state before, or `None`.
        end: `(batch, heads, chunks, features or 1, 1)`, the decays of the chunks, or
            `None`.
    """
    by_chunk = [x for x in (key, value, read, end) if x is not None]
    xs = tuple(ops.moveaxis(x, 2, 0) for x in by_chunk)
    step = _chunk_step(read is not None, end is not None)
    (state,), (before, values) = recompute_scan(step, (state,), xs)
    return ops.moveaxis(before, 0, 2), ops.moveaxis(values, 0, 2), state


@functools.cache
def _chunk_step(reads, decays):
    def step(carry, x, _):
        (state,), (key, value, *rest) = carry, x
        if reads:
            value = value - rest.pop(0) @ state
        kept = state * rest[0] if decays else state
        return (kept + ops.swapaxes(key, -1, -2) @ value,), (state, value)

    return step
