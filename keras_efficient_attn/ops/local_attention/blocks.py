"""Local attention of whole sequences and segments, in blocks of queries and keys."""

import math

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_near, attend_recent
from keras_efficient_attn.ops.common.inputs import (
    hide_masked,
    masked_inputs,
    pad_to_common_length,
)
from keras_efficient_attn.ops.common.interval_softmax.intervals import NearKeys
from keras_efficient_attn.ops.common.online_softmax import finish
from keras_efficient_attn.ops.common.plan import jit_on_jax
from keras_efficient_attn.ops.common.positions import bias_products
from keras_efficient_attn.ops.common.single_query import attend_recent_single
from keras_efficient_attn.ops.common.state import (
    append_segment,
    drop_oldest,
    nan_beyond,
)
from keras_efficient_attn.ops.local_attention.grid import attend_grid


@jit_on_jax("config", "options")
def attend_in_blocks(inputs, window_bias, state, seed, rows, config, options):
    """`(output, new state or None)` of a sequence, or of a segment with a state.

    Arguments are as for the forms of `SoftmaxCall.attend`, with a `LocalConfig` and the
    `window_bias`, or `None`.
    """
    query, key, value, valid = masked_inputs(*inputs)
    length = shape_of(query)[1]
    query = query * options.scale
    dropout = options.dropout_and_seed(seed)
    mask_fn = config.mask_fn(options.causal)
    if state is not None:
        past, position = append_segment(state, key, value, valid), state["position"]
        start = None if mask_fn.sees_all_in_reach else position
        relative = bias_products(query, window_bias)
        part = attend_recent(query, *past, mask_fn, start, dropout, relative)
        output = finish(*part, True)
        new_state = drop_oldest(past, length, position, rows.lengths)
        if config.is_grid:
            output = nan_beyond(math.prod(config.grid), new_state["position"], output)
        return output, new_state
    inputs = pad_to_common_length(query, key, value, valid)
    if config.is_grid:
        part = attend_grid(*inputs, mask_fn, dropout)
    else:
        relative = None
        if window_bias is not None:
            relative = bias_products(inputs[0], window_bias)
        part = attend_near(*inputs, mask_fn, dropout, relative, rows.documents)
    return finish(*(t[:, :length] for t in part), True), None


@jit_on_jax("config", "options", "kernel")
def attend_by_kernel(inputs, config, options, kernel):
    """The output, by a module of `interval_softmax`."""
    query, key, value, key_mask = inputs
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    pattern = NearKeys(config.mask_fn(options.causal), key.shape[1])
    return kernel.attend(query, key, value, key_mask, pattern, options.scale)


@jit_on_jax("config", "options")
def attend_next(inputs, window_bias, state, seed, rows, config, options):
    """Computes `attend_in_blocks` for one position and a state."""
    query, *segment = masked_inputs(*inputs)
    inputs = (query * options.scale, *segment)
    mask_fn = config.mask_fn(causal=True)
    dropout = options.dropout_and_seed(seed)
    output, new_state = attend_recent_single(
        inputs, state, mask_fn, dropout, window_bias, rows.lengths
    )
    if config.is_grid:
        output = nan_beyond(math.prod(config.grid), new_state["position"], output)
    return output, new_state
