"""Sparse attention of one position, over the keys of a state."""

from keras import ops

from keras_efficient_attn.ops.common.inputs import masked_inputs
from keras_efficient_attn.ops.common.plan import jit_on_jax
from keras_efficient_attn.ops.common.rows import take_rows
from keras_efficient_attn.ops.common.single_query import attend_single, seen_recent
from keras_efficient_attn.ops.common.state import (
    append_segment,
    drop_oldest,
    nan_beyond,
)
from keras_efficient_attn.ops.sparse_attention.blocks import (
    summary_positions,
    write_far,
)
from keras_efficient_attn.ops.sparse_attention.config import FAR


@jit_on_jax("config", "options")
def attend_next(inputs, state, seed, rows, config, options):
    """Computes `attend_in_blocks` for one position and a state."""
    lengths, (query, *keys) = rows.lengths, masked_inputs(*inputs)
    near, far = config.split_heads(query * options.scale, *keys)
    near_dropout, far_dropout = config.dropouts(options, seed)
    near_mask, _ = config.masks(causal=True)
    position, seen, new_state = state["position"], [], {}
    if config.near_heads:
        past = append_segment(state, *near[1:])
        allowed = seen_recent(past[2], position, near_mask)
        seen.append((near[0], *past[:2], allowed[:, None, None], near_dropout))
        new_state |= drop_oldest(past, 1, position, lengths)
    if config.far_heads:
        read = _read_column if config.pattern == "strided" else _read_summaries
        *far_keys, cache = read(state, far[1:], config, lengths)
        seen.append((far[0], *far_keys, far_dropout))
        new_state |= dict(zip(FAR, cache, strict=True))
    if config.merges:
        seen = [_join_keys(*seen)]
    outputs = [attend_single(*part) for part in seen]
    output = outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=2)
    position = position + (1 if lengths is None else lengths)
    if config.far_heads:
        output = nan_beyond(config.capacity(state["far_key"]), position, output)
    return output, {**new_state, "position": position}


def _read_column(state, keys, config, lengths):
    """Keys and values of the position's column, which it sees, and the new cache."""
    position, stride = state["position"][:, None], config.stride
    cache = write_far(state, keys, config, lengths)
    rows = cache[0].shape[1] // stride
    slots = position % stride + stride * ops.arange(rows, dtype="int32")
    key, value, valid = take_rows(slots, *cache)
    # All keys except those that the first factor sees and future ones.
    last = position - stride - 1 if config.merges else position
    allowed = ops.logical_and(slots <= last, valid > 0)
    return key, value, allowed[:, None, None], cache


def _read_summaries(state, keys, config, lengths):
    """Keys and values of all summaries, which the position sees, and the new cache.

    A position that does not exist is written with a mask of 0; the next replaces it.
    """
    position = state["position"][:, None, None]
    cache = [ops.cast(state[name], t.dtype) for name, t in zip(FAR, keys, strict=True)]
    blocks = cache[0].shape[1] // config.summary
    # (heads, slots)
    positions = summary_positions(
        blocks, config.stride, config.summary, config.far_heads
    )
    own = ops.swapaxes(positions == position, 1, 2)
    key, value, valid = keys
    cache = [
        ops.where(own[..., None], key, cache[0]),
        ops.where(own[..., None], value, cache[1]),
        ops.where(own, valid[..., None], cache[2]),
    ]
    allowed = config.masks(causal=True)[1](position, positions)
    allowed = ops.logical_and(allowed, ops.swapaxes(cache[2], 1, 2) > 0)
    return *cache[:2], allowed[:, :, None], cache


def _join_keys(near, far):
    """The keys of both factors, concatenated without repetition."""
    query, key, value, allowed, dropout = near
    _, far_key, far_value, far_allowed, _ = far
    heads = far_allowed.shape[1]
    if heads > 1:
        allowed = ops.repeat(allowed, heads, axis=1)
    return (
        query,
        ops.concatenate([key, far_key], axis=1),
        ops.concatenate([value, far_value], axis=1),
        ops.concatenate([allowed, far_allowed], axis=-1),
        dropout,
    )
