"""Sparse attention: the definition."""

import dataclasses

import numpy as np

from keras_efficient_attn.ops.common.masked_softmax import masked_attention
from keras_efficient_attn.ops.sparse_attention.patterns import (
    head_factors,
    summary_start,
)


def reference_attention(inputs, config, options):
    """The output, as `SoftmaxCall.attend` wants it of a definition."""
    queries, keys = inputs[0].shape[1], inputs[1].shape[1]
    visible = visible_keys(config, max(queries, keys), options.causal)
    return masked_attention(inputs, visible[:, :queries, :keys], options.scale)


def visible_keys(config, length, causal):
    """Which keys each head sees, a boolean NumPy array `(heads, length, length)`."""
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
