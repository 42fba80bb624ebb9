"""Attention to hard codes by the kernel of linear attention for TPUs.

With the code `c(s)` of key `s`, `exp(q·c(s))` is a product of features: `exp(q·code)`
of all codes, and the one-hot vector of `c(s)`.
"""

import functools

import keras
from keras import ops

from keras_efficient_attn.ops.common.feature_kernels.choice import (
    LinearAttentionConfig,
    choose_kernel,
    given_features,
)
from keras_efficient_attn.ops.common.numerics import max_along, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO


def kernel_for(query, keys, codes, dtype):
    """The module of the kernel for `causal_attention`, or `None` if none can run."""
    if keys.index is None:
        return None
    features = keras.KerasTensor((*query.shape[:3], codes.shape[1]), dtype)
    value = keras.KerasTensor(keys.value.shape, dtype)
    return choose_kernel(features, features, value, None, _config(codes.shape[1]))


def causal_attention(kernel, query, keys, codes, dtype):
    """The part of `causal_compressed_attention` of a sequence without earlier keys.

    Args:
        kernel: From `kernel_for`.
        query, keys: As there.
        codes: `(heads, codes, dim)`.
        dtype: In which the kernel multiplies.
    """
    features, scale = _query_features(query, keys, codes)
    (values, totals, log_scale), _ = kernel.linear_attention(
        ops.cast(features, dtype),
        ops.cast(keys.index, "float32")[..., None],
        ops.cast(keys.value, dtype),
        _config(codes.shape[1]),
        map_weights=(),
        key_log_weight=None,
        key_mask=keys.valid > 0,
        state=None,
    )
    return ops.cast(values, query.dtype), totals, log_scale + scale


def _query_features(query, keys, codes):
    """Features `(batch, length, heads, codes)`, at most 1, and their log scale.

    A code that no key has had so far must not set the scale.
    """
    number = ops.arange(codes.shape[1], dtype="int32")
    position = ops.arange(query.shape[1], dtype="int32")[:, None, None]
    has_code = ops.logical_and(
        keys.index[..., None] == number, keys.valid[:, :, None, None] > 0
    )
    first = ops.where(has_code, position, query.shape[1])
    first = ops.min(first, axis=1, keepdims=True)
    seen = first <= position
    logits = ops.einsum("bnhd,hcd->bnhc", query, codes)
    logits = where(seen, logits, LOG_ZERO)
    scale = max_along(ops.stop_gradient(logits), axis=-1)
    return ops.where(seen, ops.exp(logits - scale[..., None]), 0.0), scale


@functools.cache
def _config(num_codes):
    return LinearAttentionConfig(
        given_features,
        functools.partial(_one_hot, num_codes),
        num_codes,
        causal=True,
        output="partial",
        rowwise_maps=True,
    )


def _one_hot(num_codes, index):
    """The feature map of keys, from their codes `(..., 1)`."""
    # A kernel's constants have two axes at least.
    number = ops.cast(ops.arange(num_codes)[None], index.dtype)
    return ops.cast(index == number, index.dtype), None
