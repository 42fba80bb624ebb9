"""Local attention of whole sequences by a kernel of the backend."""

from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.interval_softmax.intervals import NearKeys


@jit_on_jax("config", "options", "kernel")
def attend_by_kernel(inputs, config, options, kernel):
    """The output, by a module of `interval_softmax`."""
    query, key, value, key_mask = inputs
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    pattern = NearKeys(config.mask_fn(options.causal), key.shape[1])
    return kernel.attend(query, key, value, key_mask, pattern, options.scale)
