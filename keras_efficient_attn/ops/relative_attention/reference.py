"""Attention with relative positions: the definition."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divided


def reference_attention(inputs, position_key, biases, documents, config, options):
    """Quadratic, from the formula.

    Args:
        inputs: `(query, key, value, key_mask)`.
        position_key, documents: As for `relative_attention`.
        biases: Pair of `(heads, dim)` or `None`.
        config: `RelativeConfig`.
        options: `SoftmaxOptions`.
    """
    query, key, value, key_mask = inputs
    dtype = accumulator_dtype(query, key, value)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    length, keys = query.shape[1], key.shape[1]
    distance = config.offset + np.arange(length)[:, None] - np.arange(keys)
    seen = distance >= 0 if options.causal else np.ones_like(distance, bool)
    if config.window is not None:
        seen = seen & (np.abs(distance) < config.window)
    allowed = ops.convert_to_tensor(seen)[None, None]
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")
        allowed = ops.logical_and(allowed, kept[:, None, None, :])
        key, value = (ops.where(kept[..., None, None], t, 0.0) for t in (key, value))
    if documents is not None:
        same = documents[0][:, :, None] == documents[1][:, None, :]
        allowed = ops.logical_and(allowed, same[:, None])
    content, position = (
        query if bias is None else query + ops.cast(bias, dtype) for bias in biases
    )
    rows = np.clip(config.offset + length - 1 - distance, 0, position_key.shape[0] - 1)
    by_pair = ops.take(ops.cast(position_key, dtype), rows, axis=0)
    logits = ops.einsum("bthd,bshd->bhts", content, key)
    logits = logits + ops.einsum("bthd,tshd->bhts", position, by_pair)
    logits = ops.where(allowed, logits * options.scale, LOG_ZERO)
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    weights = ops.where(allowed, weights, 0.0)
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    return divided(values, ops.swapaxes(ops.sum(weights, axis=-1), 1, 2))
