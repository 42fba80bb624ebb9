"""Attention with relative positions: the definition."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.dense_softmax import (
    dense_attention,
    dense_products,
)
from keras_efficient_attn.ops.relative_attention.tiles import biased_queries


def reference_attention(inputs, position_key, biases, documents, config, options):
    """The output by the formula; arguments as for `attend_in_tiles`."""

    def weigh(query, key):
        length, keys = query.shape[1], key.shape[1]
        distance = config.offset + np.arange(length)[:, None] - np.arange(keys)
        seen = distance >= 0 if options.causal else np.ones_like(distance, bool)
        if config.window is not None:
            seen = seen & (np.abs(distance) < config.window)
        allowed = ops.convert_to_tensor(seen)[None, None]
        if documents is not None:
            same = documents[0][:, :, None] == documents[1][:, None, :]
            allowed = ops.logical_and(allowed, same[:, None])
        content, position = biased_queries(query, biases, options.scale)
        rows = config.offset + length - 1 - distance
        rows = np.clip(rows, 0, position_key.shape[0] - 1)
        by_pair = ops.take(ops.cast(position_key, query.dtype), rows, axis=0)
        # Keras' `take` from no rows has another shape on JAX.
        by_pair = ops.reshape(by_pair, (length, keys, *position_key.shape[1:]))
        by_distance = ops.einsum("bthd,tshd->bhts", position, by_pair)
        return dense_products(content, key) + by_distance, allowed

    return dense_attention(inputs, weigh)
