"""Local attention: the definition."""

import numpy as np

from keras_efficient_attn.ops.common.dense_softmax import (
    dense_attention,
    dense_products,
)


def visible_keys(config, query_length, key_length, causal):
    """The mask of visible keys, a boolean NumPy array `(queries, keys)`."""
    i, j = np.arange(query_length)[:, None], np.arange(key_length)[None, :]
    return config.mask_fn(causal)(i, j)


def reference_attention(inputs, config, options):
    """The output by the formula."""

    def weigh(query, key):
        visible = visible_keys(config, query.shape[1], key.shape[1], options.causal)
        return dense_products(query * options.scale, key), visible

    return dense_attention(inputs, weigh)
