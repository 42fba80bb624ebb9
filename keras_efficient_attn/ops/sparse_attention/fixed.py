"""The fixed pattern's second factor: softmax over the summaries of all blocks.

Each head has its own summaries, `summary` positions of each block of `stride`.
"""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_shared
from keras_efficient_attn.ops.common.chunking import chunk_count, pad_length
from keras_efficient_attn.ops.common.constants import constant
from keras_efficient_attn.ops.sparse_attention.patterns import summary_start


def attend_summaries(query, key, value, valid, mask_fn, summary, dropout):
    """Partial softmax over the summaries of a whole sequence.

    Args:
        query, key, value: `(batch, length, heads, dim)`, equally long.
        valid: `(batch, length)`.
        mask_fn: `Summaries`.
        summary: Positions per summary.
        dropout: `(rate, seed)` or `None`.
    """
    stride, heads = mask_fn.stride, query.shape[2]
    length = shape_of(query)[1]
    blocks = chunk_count(length, stride)
    valid = ops.broadcast_to(valid[..., None], shape_of(key)[:3])
    return attend_shared(
        query,
        *(gather_summaries(x, stride, summary) for x in (key, value, valid)),
        mask_fn,
        (
            ops.arange(length, dtype="int32"),
            summary_positions(blocks, stride, summary, heads),
        ),
        dropout,
    )


def gather_summaries(x, stride, summary):
    """Each head's summaries: `(batch, length, heads, ...)`, of fewer positions."""
    batch, length, heads, *tail = shape_of(x)
    blocks = chunk_count(length, stride)
    x = pad_length(x, 0, blocks * stride - length)
    x = ops.reshape(x, (batch, blocks, stride, heads, *tail))
    starts = [summary_start(stride, summary, head) for head in range(heads)]
    x = ops.stack(
        [x[:, :, s : s + summary, head] for head, s in enumerate(starts)], axis=3
    )
    return ops.reshape(x, (batch, blocks * summary, heads, *tail))


def attend_cached_summaries(query, cache, mask_fn, summary, start, dropout):
    """Partial softmax of a segment over a cache of summaries, including its own.

    Args:
        query: `(batch, length, heads, dim)`, from position `start` on.
        cache: Keys, values and masks, `(batch, blocks · summary, heads, ...)`.
        mask_fn: A causal `Summaries`.
        summary: Positions per summary.
        start: Scalar.
        dropout: `(rate, seed)` or `None`.
    """
    length, heads = shape_of(query)[1], query.shape[2]
    blocks = cache[0].shape[1] // summary
    positions = (
        start + ops.arange(length, dtype="int32"),
        summary_positions(blocks, mask_fn.stride, summary, heads),
    )
    return attend_shared(query, *cache, mask_fn, positions, dropout)


def write_summaries(cache, segment, stride, summary, start):
    """Writes a segment's summaries to a cache.

    Args:
        cache: `(batch, blocks · summary, heads, ...)`.
        segment: `(batch, length, heads, ...)`, from position `start` on.
        stride, summary: Positions of a block and of its summary.
        start: Scalar.
    """
    length, heads = shape_of(segment)[1], cache.shape[2]
    blocks = cache.shape[1] // summary
    # The position in the segment of each slot's key.
    steps = summary_positions(blocks, stride, summary, heads) - start
    held = ops.logical_and(steps >= 0, steps < length)
    steps = ops.clip(steps, 0, length - 1)
    written = ops.stack(
        [ops.take(segment[:, :, head], steps[head], axis=1) for head in range(heads)],
        axis=2,
    )
    held = ops.reshape(
        ops.swapaxes(held, 0, 1), (1, -1, heads) + (1,) * (len(cache.shape) - 3)
    )
    return ops.where(held, written, cache)


def summary_positions(blocks, stride, summary, heads):
    """Positions of the summaries of blocks: integers `(heads, blocks · summary)`."""
    inside = constant(_summary_offsets, stride, summary, heads, dtype="int32")
    first = stride * ops.arange(blocks, dtype="int32")[:, None]
    return ops.reshape(inside + first, (heads, blocks * summary))


def _summary_offsets(stride, summary, heads):
    """Positions of a block's summary from the block's start: `(heads, 1, summary)`."""
    starts = [summary_start(stride, summary, head) for head in range(heads)]
    return np.asarray(starts)[:, None, None] + np.arange(summary)
