"""Local attention of one position, over the keys of a state."""

from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import masked_inputs
from keras_efficient_attn.ops.common.single_query import attend_recent_single


@jit_on_jax("config", "options")
def attend_next(inputs, window_bias, state, seed, config, options):
    """Computes `attend_in_blocks` for one position and a state."""
    query, *segment = masked_inputs(*inputs)
    inputs = (query * options.scale, *segment)
    mask_fn = config.mask_fn(causal=True)
    dropout = options.dropout_and_seed(seed)
    return attend_recent_single(inputs, state, mask_fn, dropout, window_bias)
