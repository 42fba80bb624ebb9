"""Sparse attention of whole sequences and segments, in blocks of queries and keys."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_near, attend_recent
from keras_efficient_attn.ops.common.cache import nan_beyond, write_positions
from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import masked_inputs, pad_to_common_length
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.common.recent_keys import append_segment, drop_oldest
from keras_efficient_attn.ops.common.state import common_position
from keras_efficient_attn.ops.sparse_attention.config import FAR
from keras_efficient_attn.ops.sparse_attention.fixed import (
    attend_cached_summaries,
    attend_summaries,
    write_summaries,
)
from keras_efficient_attn.ops.sparse_attention.strided import (
    attend_cached_columns,
    attend_columns,
)


@jit_on_jax("config", "options")
def attend_in_blocks(inputs, state, seed, config, options):
    """`(output, new state or None)` of a sequence, or of a segment with a state.

    Arguments are as for the forms of `SoftmaxCall.attend`, with a `SparseConfig`.
    """
    length = shape_of(inputs[0])[1]
    inputs = masked_inputs(*inputs)
    if state is None:
        inputs = pad_to_common_length(*inputs)
    query, *keys = inputs
    near, far = config.split_heads(query * options.scale, *keys)
    near_mask, far_mask = config.masks(options.causal)
    near_dropout, far_dropout = config.dropouts(options, seed)
    parts, new_state = [], {}
    if config.near_heads and state is None:
        parts.append(attend_near(*near, near_mask, near_dropout))
    elif config.near_heads:
        past, position = append_segment(state, *near[1:]), state["position"]
        parts.append(
            attend_recent(
                near[0], *past, near_mask, common_position(position), near_dropout
            )
        )
        new_state |= drop_oldest(past, length, position)
    if config.far_heads and state is None:
        parts.append(_attend_far(far, far_mask, far_dropout, config))
    elif config.far_heads:
        cache = write_far(state, far[1:], config)
        parts.append(
            _attend_cache(
                far[0], cache, common_position(state["position"]), far_dropout, config
            )
        )
        new_state |= dict(zip(FAR, cache, strict=True))
    if config.merges:
        output = finish(*merge(parts), True)
    else:
        output = ops.concatenate([finish(*part, True) for part in parts], axis=2)
    if state is None:
        return output[:, :length], None
    if config.far_heads:
        capacity = config.capacity(state["far_key"])
        output = nan_beyond(capacity, common_position(state["position"]), output)
    return output, {**new_state, "position": state["position"] + length}


def _attend_far(inputs, mask_fn, dropout, config):
    if config.pattern == "strided":
        return attend_columns(*inputs, mask_fn, dropout)
    return attend_summaries(*inputs, mask_fn, config.summary, dropout)


def _attend_cache(query, cache, start, dropout, config):
    _, mask_fn = config.masks(causal=True)
    if config.pattern == "strided":
        return attend_cached_columns(query, cache, mask_fn, start, dropout)
    return attend_cached_summaries(
        query, cache, mask_fn, config.summary, start, dropout
    )


def write_far(state, keys, config):
    """The second factor's cache, with the keys, values and masks of a segment."""
    start = common_position(state["position"])
    cache = [ops.cast(state[name], t.dtype) for name, t in zip(FAR, keys, strict=True)]
    if config.pattern == "strided":
        return [
            write_positions(old, new, start)
            for old, new in zip(cache, keys, strict=True)
        ]
    key, value, valid = keys
    valid = ops.broadcast_to(valid[..., None], shape_of(key)[:3])
    return [
        write_summaries(old, new, config.stride, config.summary, start)
        for old, new in zip(cache, (key, value, valid), strict=True)
    ]
