"""Local attention: the definition."""

import numpy as np

from keras_efficient_attn.ops.common.masked_softmax import masked_attention


def visible_keys(config, query_length, key_length, causal):
    """Which keys each query sees, a boolean NumPy array `(queries, keys)`."""
    i, j = np.arange(query_length)[:, None], np.arange(key_length)[None, :]
    return config.mask_fn(causal)(i, j)


def reference_attention(inputs, config, options):
    """The output, as `SoftmaxCall.attend` wants it of a definition."""
    lengths = inputs[0].shape[1], inputs[1].shape[1]
    visible = visible_keys(config, *lengths, options.causal)
    return masked_attention(inputs, visible[None], options.scale)
