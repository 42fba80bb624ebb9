"""Exact attention to the nearest keys, joined with features for the far ones."""

import functools

from keras import ops

from keras_efficient_attn.ops.chunking import (
    by_head,
    by_position,
    chunk_layout,
    join_groups,
    pad_length,
    split_groups,
)
from keras_efficient_attn.ops.compiled import compiled
from keras_efficient_attn.ops.linear_attention import mapped_linear_attention
from keras_efficient_attn.ops.partial_attention import (
    LOG_ZERO,
    accumulator_dtype,
    finish,
    merge,
)
from keras_efficient_attn.ops.recompute import recompute_scan

MIN_BLOCK = 64


@compiled(
    "window",
    "query_map",
    "key_map",
    "num_features",
    "causal",
    "chunk_size",
    "normalize",
)
def windowed_linear_attention(
    query,
    key,
    value,
    *,
    window,
    query_map,
    key_map,
    num_features,
    map_weights=(),
    key_mask=None,
    causal=False,
    state=None,
    chunk_size=64,
    normalize=True,
):
    """Linear attention whose nearest keys are attended exactly.

    ```
    w[t, s] = exp(q[t] · k[s])    if |t - s| < window
              φ(q[t]) · φ(k[s])   otherwise
    ```

    under one denominator. The feature map has to estimate `exp(q · k)`. Far keys are
    the causal linear attention over keys that are delayed by the window, so the
    whole stays linear, streams, and never subtracts.

    Args:
        query, key, value: `(batch, length, heads, dim)`, equally long.
        window: Positive integer: a query sees itself and `window - 1` earlier keys
            exactly and, if not causal, as many later ones.
        query_map, key_map, num_features, map_weights, key_mask, causal,
            chunk_size: As for `mapped_linear_attention`.
        state: Optional state; needs `causal`. The linear state of the far keys, and
            the last `window` keys in `"window_key"`, `"window_value"` and
            `"window_mask"`.
        normalize: Whether to divide by the sum of the weights.

    Returns:
        `(output, state)`: `(batch, length, heads, value_dim)` in the accumulator's
        dtype, and the new state or `None`.
    """
    dtype = accumulator_dtype(query, key, value)
    if key_mask is None:
        valid = ops.ones(ops.shape(key)[:2], dtype)
    else:
        kept = ops.cast(key_mask, "bool")[..., None, None]
        key = ops.where(kept, key, ops.zeros_like(key))
        value = ops.where(kept, value, ops.zeros_like(value))
        valid = ops.cast(key_mask, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    length = ops.shape(query)[1]

    # Everything that has a past: the last `window` positions before this segment.
    if state is None:
        past = tuple(pad_length(t[:, :0], window, 0) for t in (key, value, valid))
        far_state = None
    else:
        names = ("window_key", "window_value", "window_mask")
        past = tuple(ops.cast(state[name], dtype) for name in names)
        far_state = {k: v for k, v in state.items() if k not in names}
    history = tuple(
        ops.concatenate([old, new], axis=1)
        for old, new in zip(past, (key, value, valid), strict=True)
    )

    def far(query, delayed, state):
        key, value, valid = delayed
        return mapped_linear_attention(
            query,
            key,
            value,
            query_map=query_map,
            key_map=key_map,
            num_features=num_features,
            map_weights=map_weights,
            key_mask=valid > 0,
            causal=True,
            state=state,
            chunk_size=chunk_size,
            output="partial",
        )

    before, far_state = far(query, tuple(t[:, :length] for t in history), far_state)
    parts = [_near(query, *history, window, causal), before]
    if not causal:
        delayed = tuple(
            pad_length(ops.flip(t[:, window:], axis=1), window, 0)[:, :length]
            for t in (key, value, valid)
        )
        after, _ = far(ops.flip(query, axis=1), delayed, None)
        parts.append(tuple(ops.flip(t, axis=1) for t in after))
    output = finish(*merge(parts), normalize)
    if state is None:
        return output, None
    names = ("window_key", "window_value", "window_mask")
    recent = (t[:, length:] for t in history)
    return output, {**far_state, **dict(zip(names, recent, strict=True))}


def _near(query, key, value, valid, window, causal):
    """The part of the keys in the window; keys start `window` before the queries."""
    length = ops.shape(query)[1]
    heads, dim = query.shape[2:]
    block = max(MIN_BLOCK, window)
    floats = heads * (3 * block + 4 * (dim + (value.shape[-1] or dim)))
    block, blocks, groups = chunk_layout(length, block, query.shape[0], floats)
    total = groups * blocks * block
    after = 0 if causal else window

    def local(x):
        """`(batch, total / block, window + block + after, ...)`: what blocks see."""
        x = pad_length(x, 0, total + after - length)
        shape = ops.shape(x)
        pieces = []
        start, stop = 0, window + block + after
        while start < stop:
            width = min(block, stop - start)
            piece = pad_length(x[:, start:], 0, block)[:, :total]
            piece = ops.reshape(piece, (shape[0], total // block, block, *shape[2:]))
            pieces.append(piece[:, :, :width])
            start += width
        return ops.concatenate(pieces, axis=2)

    width = window + block + after
    keys = tuple(
        ops.reshape(t, (ops.shape(t)[0], (total // block) * width, *ops.shape(t)[3:]))
        for t in map(local, (key, value, valid))
    )
    xs = (split_groups(query, groups, blocks * block),) + tuple(
        split_groups(t, groups, blocks * width) for t in keys
    )
    step = _near_step(block, window, causal)
    _, part = recompute_scan(step, (), xs)
    return tuple(join_groups(t, length) for t in part)


@functools.cache
def _near_step(block, window, causal):
    width = window + block + (0 if causal else window)

    def step(carry, x, _):
        query, key, value, valid = x
        query = by_head(query, block)
        key, value, valid = (by_head(t, width) for t in (key, value, valid[..., None]))
        distance = window + ops.arange(block)[:, None] - ops.arange(width)[None, :]
        allowed = distance < window
        lowest = 0 if causal else 1 - window
        allowed = ops.logical_and(allowed, distance >= lowest)
        allowed = ops.logical_and(allowed, valid[..., None, :] > 0)
        logits = query @ ops.swapaxes(key, -1, -2)
        logits = ops.where(allowed, logits, LOG_ZERO)
        scale = ops.max(ops.stop_gradient(logits), axis=-1)
        weights = ops.where(allowed, ops.exp(logits - scale[..., None]), 0.0)
        part = (weights @ value, ops.sum(weights, axis=-1), scale)
        return carry, tuple(by_position(t) for t in part)

    return step
