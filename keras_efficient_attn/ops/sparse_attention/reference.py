"""Sparse attention: the definition."""

import dataclasses

import numpy as np

from keras_efficient_attn.ops.common.dense_softmax import (
    dense_attention,
    dense_products,
)
from keras_efficient_attn.ops.sparse_attention.config import (
    head_factors,
    summary_start,
)


def reference_attention(inputs, config, options):
    """The output by the formula."""

    def weigh(query, key):
        queries, keys = query.shape[1], key.shape[1]
        visible = visible_keys(config, max(queries, keys), options.causal)
        products = dense_products(query * options.scale, key)
        return products, visible[:, :queries, :keys]

    return dense_attention(inputs, weigh)


def visible_keys(config, length, causal):
    """The mask of each head, a boolean NumPy array `(heads, length, length)`."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    near_mask, far_mask = config.masks(causal)
    first = near_mask(i, j)
    second = dataclasses.replace(far_mask, remainder=False)(i, j)
    strided = config.pattern == "strided"
    matrices = []
    for near, number in head_factors(config):
        seen = first if near else np.zeros_like(first)
        if number is not None and strided:
            seen = seen | second
        elif number is not None:
            start = summary_start(config.stride, config.summary, number)
            offset = j % config.stride - start
            seen = seen | (second & (offset >= 0) & (offset < config.summary))
        matrices.append(seen)
    return np.stack(matrices)
