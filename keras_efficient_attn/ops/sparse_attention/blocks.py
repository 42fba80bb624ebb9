"""Sparse attention of whole sequences and segments, in blocks of queries and keys."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import (
    attend_blocks,
    attend_near,
    attend_recent,
    attend_shared,
)
from keras_efficient_attn.ops.common.chunking import (
    by_column,
    by_row,
    chunk_count,
    pad_length,
)
from keras_efficient_attn.ops.common.constants import constant
from keras_efficient_attn.ops.common.inputs import masked_inputs, pad_to_common_length
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.common.plan import jit_on_jax
from keras_efficient_attn.ops.common.rows import take_rows
from keras_efficient_attn.ops.common.state import (
    append_segment,
    drop_oldest,
    nan_beyond,
    write_positions,
)
from keras_efficient_attn.ops.sparse_attention.config import FAR, summary_start


@jit_on_jax("config", "options")
def attend_in_blocks(inputs, state, seed, rows, config, options):
    """`(output, new state or None)` of a sequence, or of a segment with a state.

    Arguments are as for the forms of `SoftmaxCall.attend`, with a `SparseConfig`.
    """
    length, (lengths, documents) = shape_of(inputs[0])[1], rows
    inputs = masked_inputs(*inputs)
    if state is None:
        inputs = pad_to_common_length(*inputs)
    elif isinstance(length, int) and length == 0:
        return inputs[2], state
    query, *keys = inputs
    near, far = config.split_heads(query * options.scale, *keys)
    near_mask, far_mask = config.masks(options.causal)
    near_dropout, far_dropout = config.dropouts(options, seed)
    parts, new_state = [], {}
    if config.near_heads and state is None:
        parts.append(attend_near(*near, near_mask, near_dropout, documents=documents))
    elif config.near_heads:
        past, position = append_segment(state, *near[1:]), state["position"]
        start = None if near_mask.sees_all_in_reach else position
        parts.append(attend_recent(near[0], *past, near_mask, start, near_dropout))
        new_state |= drop_oldest(past, length, position, lengths)
    if config.far_heads and state is None:
        if config.pattern == "strided":
            part = attend_columns(*far, far_mask, far_dropout, documents)
        elif documents is not None:
            part = attend_summaries_by_document(
                *far, far_mask, config.summary, far_dropout, documents
            )
        else:
            summaries = gather_all_summaries(far[1:], config)
            part = attend_summaries(far[0], summaries, far_mask, config, far_dropout)
        parts.append(part)
    elif config.far_heads:
        cache, start = write_far(state, far[1:], config, lengths), state["position"]
        if config.pattern == "strided":
            part = attend_cached_columns(far[0], cache, far_mask, start, far_dropout)
        else:
            how = far_mask, config, far_dropout, start
            part = attend_summaries(far[0], cache, *how)
        parts.append(part)
        new_state |= dict(zip(FAR, cache, strict=True))
    if config.factors == "merged":
        output = finish(*merge(parts), True)
    else:
        output = ops.concatenate([finish(*part, True) for part in parts], axis=2)
    if state is None:
        return output[:, :length], None
    position = state["position"] + (length if lengths is None else lengths)
    if config.far_heads:
        output = nan_beyond(config.capacity(state["far_key"]), position, output)
    return output, {**new_state, "position": position}


def write_far(state, keys, config, lengths):
    """The second factor's cache, with the keys, values and masks of a segment."""
    start = state["position"]
    cache = [ops.cast(state[name], t.dtype) for name, t in zip(FAR, keys, strict=True)]
    if config.pattern == "strided":
        return write_positions(cache, keys, start, lengths)
    key, value, valid = keys
    valid = ops.broadcast_to(valid[..., None], shape_of(key)[:3])
    return [
        write_summaries(old, new, config.stride, config.summary, start)
        for old, new in zip(cache, (key, value, valid), strict=True)
    ]


def attend_columns(query, key, value, valid, mask_fn, dropout, documents):
    """Partial softmax of every column, for `(batch, length, heads, dim)`."""
    length, stride = shape_of(query)[1], mask_fn.stride
    rows = chunk_count(length, stride)
    query, key, value, valid = (
        by_column(t, rows, stride) for t in (query, key, value, valid)
    )
    positions = (ops.arange(rows, dtype="int32") * stride,) * 2
    if documents is not None:
        places = (
            by_column(x, rows, stride) for x in (documents.position, documents.number)
        )
        positions = tuple(x for x in places for _ in range(2))
    part = attend_blocks(query, key, value, valid, mask_fn, positions, dropout)
    return tuple(by_row(t)[:, :length] for t in part)


def attend_summaries_by_document(
    query, key, value, valid, mask_fn, summary, dropout, documents
):
    """`attend_summaries` of each document by itself.

    Summaries are at other places in each row: all keys are read, in quadratic time.
    """
    heads, stride = query.shape[2], mask_fn.stride
    starts = summary_positions(1, stride, summary, heads)[:, 0]
    step = (documents.position % stride)[..., None]
    in_summary = ops.logical_and(step >= starts, step < starts + summary)
    valid = valid[..., None] * ops.cast(in_summary, valid.dtype)
    positions = documents.position, documents.position[:, None]
    numbers = documents.number, documents.number[:, None]
    inputs = query, key, value, valid
    return attend_shared(*inputs, mask_fn, (*positions, *numbers), dropout)


def attend_cached_columns(query, cache, mask_fn, start, dropout):
    """Partial softmax of a segment over a cache that already holds the segment.

    Args:
        query: `(batch, length, heads, dim)`, from position `start` on.
        cache: Keys and values `(batch, capacity, heads, dim)`, position `s` in slot
            `s`, and masks `(batch, capacity)`, 0 for slots that hold no key.
        mask_fn: A causal `Columns`.
        start: Integers `(batch,)`.
        dropout: `(rate, seed)` or `None`.
    """
    length, stride = shape_of(query)[1], mask_fn.stride
    # A segment shorter than a row reads only its own columns.
    columns = min(stride, length) if isinstance(length, int) else stride
    rows = chunk_count(length, columns)
    step = ops.arange(columns, dtype="int32")
    first = start[:, None, None] + step[:, None]
    cached = cache[0].shape[1] // stride
    # (batch, columns, rows)
    slots = first % stride + stride * ops.arange(cached, dtype="int32")

    batch = shape_of(query)[0]
    found = take_rows(ops.reshape(slots, (batch, columns * cached)), *cache)
    found = (ops.reshape(x, (batch, columns, cached, *shape_of(x)[2:])) for x in found)
    positions = first + columns * ops.arange(rows, dtype="int32"), slots
    query = by_column(query, rows, columns)
    part = attend_blocks(query, *found, mask_fn, positions, dropout)
    return tuple(by_row(t)[:, :length] for t in part)


def attend_summaries(query, summaries, mask_fn, config, dropout, start=None):
    """Partial softmax over the summaries of a sequence.

    Args:
        query: `(batch, length, heads, dim)`, from position `start` on.
        summaries: Keys, values and masks, `(batch, blocks · summary, heads, ...)`; with
            `start`, a cache that already holds the segment's.
        mask_fn: `Summaries`.
        config: `SparseConfig`.
        dropout: `(rate, seed)` or `None`.
        start: Integers `(batch,)`, or `None` for a whole sequence.
    """
    length, heads = shape_of(query)[1], query.shape[2]
    blocks = shape_of(summaries[0])[1] // config.summary
    steps = ops.arange(length, dtype="int32")
    positions = (
        steps if start is None else start[:, None] + steps,
        summary_positions(blocks, config.stride, config.summary, heads),
    )
    return attend_shared(query, *summaries, mask_fn, positions, dropout)


def gather_all_summaries(keys, config):
    """The summaries of keys, of values and of their mask `(batch, length)` or `None`.

    The first two are `(batch, length, heads, ...)`; so are all results but `None`.
    """
    key, value, valid = keys
    if valid is not None:
        valid = ops.broadcast_to(valid[..., None], shape_of(key)[:3])
    return [
        None if x is None else gather_summaries(x, config.stride, config.summary)
        for x in (key, value, valid)
    ]


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


def write_summaries(cache, segment, stride, summary, start):
    """Writes a segment's summaries to a cache.

    Args:
        cache: `(batch, blocks · summary, heads, ...)`.
        segment: `(batch, length, heads, ...)`, from position `start` on.
        stride, summary: Positions of a block and of its summary.
        start: Integers `(batch,)`.
    """
    length, heads = shape_of(segment)[1], cache.shape[2]
    blocks = cache.shape[1] // summary
    # The position in the segment of each slot's key.
    steps = summary_positions(blocks, stride, summary, heads) - start[:, None, None]
    held = ops.logical_and(steps >= 0, steps < length)
    steps = ops.clip(steps, 0, length - 1)
    written = ops.swapaxes(take_rows(steps, ops.swapaxes(segment, 1, 2))[0], 1, 2)
    held = ops.swapaxes(held, 1, 2)
    held = ops.reshape(held, (*shape_of(held), *[1] * (len(cache.shape) - 3)))
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
