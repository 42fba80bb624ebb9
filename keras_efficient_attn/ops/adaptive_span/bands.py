"""Softmax under a soft mask over distances, on the band of the matrix that it keeps."""

import functools

from keras import ops

from keras_efficient_attn.ops.common.block_softmax import scan_groups
from keras_efficient_attn.ops.common.chunking import (
    chunk_count,
    chunk_layout,
    heads_first,
    overlapping_blocks,
    pad_to,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.relative_positions import shifted_to_keys
from keras_efficient_attn.ops.common.weight_dropout import drop

MIN_BLOCK = 64


def soft_mask(spans, distance, ramp):
    """`min(max((ramp + span - distance) / ramp, 0), 1)`, of a new last axes.

    Args:
        spans: `(..., queries)`, in positions.
        distance: Integers `(queries, keys)`, not negative.
        ramp: Positions over which the mask falls from 1 to 0.
    """
    mask = (ramp + spans[..., None] - ops.cast(distance, spans.dtype)) / ramp
    # Not `clip`, whose gradient at its limits depends on the backend.
    mask = ops.where(mask < 1.0, mask, 1.0)
    return ops.where(mask > 0.0, mask, 0.0)


def attend_bands(
    query, key, value, valid, spans, *, window, causal, ramp, position_key, dropout
):
    """`(values, totals, log_scale)` of each query over the keys in its band.

    Args:
        query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, window - 1 + length, heads, dim)`: those of the
            positions, and of `window - 1` before them; `value` zero where not valid.
        valid: `(batch, window - 1 + length)`, 1 for keys that exist.
        spans: `(heads,)`, or `(batch, length, heads)`.
        window: A query sees itself and `window - 1` earlier keys and, if not causal,
            as many later ones.
        causal: Whether queries see no later keys.
        ramp: As for `soft_mask`.
        position_key: `(window, dim)` by distance, or `None`.
        dropout: `(rate, seed)` or `None`.
    """
    batch, _, heads, dim = query.shape
    length = ops.shape(query)[1]
    # Blocks shorter than the window waste less of the products, and copy more keys.
    size = max(MIN_BLOCK, window // 4)
    if isinstance(length, int):
        size = max(1, min(size, length))
    blocks = chunk_count(length, size)
    width = (window - 1) * (1 if causal else 2) + size
    if len(spans.shape) == 1:
        spans = ops.broadcast_to(spans, (1, blocks, 1, heads))
    else:
        spans = overlapping_blocks(spans, size, blocks, size)
    arrays = [overlapping_blocks(query, size, blocks, size)]
    arrays += (overlapping_blocks(t, size, blocks, width) for t in (key, value, valid))
    arrays.append(spans)
    value_dim = value.shape[-1] or dim
    floats = heads * (3 * size * width + (size + 2 * width) * (dim + value_dim))
    unit = max(1, MIN_BLOCK // size)
    unit, units, groups = chunk_layout(blocks, unit, batch, floats)
    xs = [pad_to(x, groups * unit * units) for x in arrays]
    consts = []
    if position_key is not None:
        # From the first key in the band of a query to the last.
        by_key = ops.flip(position_key, axis=0)
        if not causal:
            by_key = ops.concatenate([by_key, position_key[1:]], axis=0)
        consts.append(by_key)
    rate = None
    if dropout is not None:
        rate, seed = dropout
        xs.append(ops.cast(ops.arange(groups), query.dtype)[None])
        consts.append(ops.cast(seed, query.dtype))
    step = _band_step(window, causal, ramp, position_key is not None, rate)
    part = scan_groups(step, tuple(xs), tuple(consts), groups)
    return tuple(_joined(t[:, :blocks])[:, :length] for t in part)


@functools.cache
def _band_step(window, causal, ramp, relative, rate):
    def step(carry, x, consts):
        query, key, value, valid, spans, *rest = x
        query, key, value, spans = (heads_first(t) for t in (query, key, value, spans))
        size, width = query.shape[3], key.shape[3]
        logits = query @ ops.swapaxes(key, -1, -2)
        if relative:
            of_positions = query @ ops.transpose(consts[0])
            logits = logits + shifted_to_keys(of_positions, width)
        distance = ops.arange(size, dtype="int32")[:, None] + (window - 1)
        distance = distance - ops.arange(width, dtype="int32")
        near = ops.logical_and(
            distance < window, distance >= (0 if causal else 1 - window)
        )
        mask = soft_mask(spans, ops.abs(distance), ramp)
        exists = ops.logical_and(near, valid[:, None, :, None, :] > 0)
        exists = ops.logical_and(exists, mask > 0)
        logits = ops.where(exists, logits, LOG_ZERO)
        scale = ops.max(ops.stop_gradient(logits), axis=-1)
        weights = ops.where(exists, mask * ops.exp(logits - scale[..., None]), 0.0)
        totals = ops.sum(weights, axis=-1)
        if rate is not None:
            weights = drop(weights, rate, rest[-1][0, 0], consts[-1])
        part = weights @ value, totals, scale
        # (batch, blocks, size, heads, ...)
        return carry, tuple(
            ops.transpose(t, (0, 2, 3, 1, 4)[: len(t.shape)]) for t in part
        )

    return step


def _joined(x):
    """`(batch, blocks, size, ...)` as `(batch, blocks · size, ...)`."""
    batch, blocks, size, *tail = ops.shape(x)
    return ops.reshape(x, (batch, blocks * size, *tail))
