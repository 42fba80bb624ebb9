"""Local attention of whole sequences and segments, in blocks of queries and keys."""

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_near, attend_recent
from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import masked_inputs, pad_to_common_length
from keras_efficient_attn.ops.common.online_softmax import finish
from keras_efficient_attn.ops.common.recent_keys import append_segment, drop_oldest
from keras_efficient_attn.ops.common.relative_positions import bias_products
from keras_efficient_attn.ops.common.state import common_position
from keras_efficient_attn.ops.local_attention.grid import attend_grid


@jit_on_jax("config", "options")
def attend_in_blocks(inputs, window_bias, state, seed, config, options):
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
        start, relative = common_position(position), bias_products(query, window_bias)
        part = attend_recent(query, *past, mask_fn, start, dropout, relative)
        return finish(*part, True), drop_oldest(past, length, position)
    inputs = pad_to_common_length(query, key, value, valid)
    if config.is_grid:
        part = attend_grid(*inputs, mask_fn, dropout)
    else:
        relative = bias_products(inputs[0], window_bias)
        part = attend_near(*inputs, mask_fn, dropout, relative)
    return finish(*(t[:, :length] for t in part), True), None
