"""Local attention: the definition."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.dense_softmax import (
    dense_attention,
    dense_products,
)


def visible_keys(config, query_length, key_length, causal):
    """The mask of visible keys, a boolean NumPy array `(queries, keys)`."""
    i, j = np.arange(query_length)[:, None], np.arange(key_length)[None, :]
    return config.mask_fn(causal)(i, j)


def reference_attention(inputs, window_bias, config, options):
    """The output by the formula."""

    def weigh(query, key):
        visible = visible_keys(config, query.shape[1], key.shape[1], options.causal)
        logits = dense_products(query * options.scale, key)
        if window_bias is None:
            return logits, visible
        i, j = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None, :]
        index = np.clip(config.window - 1 - (i - j), 0, window_bias.shape[0] - 1)
        by_key = ops.take(ops.cast(window_bias, logits.dtype), index, axis=0)
        return logits + ops.transpose(by_key, (2, 0, 1)), visible

    return dense_attention(inputs, weigh)
