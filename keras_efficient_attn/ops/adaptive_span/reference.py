"""Attention with a soft mask over distances: the definition."""

from keras import ops

from keras_efficient_attn.ops.adaptive_span.bands import soft_mask
from keras_efficient_attn.ops.common.dense_softmax import (
    dense_attention,
    dense_products,
)


def reference_attention(inputs, spans, position_key, config, options):
    """The output by the formula; arguments as for the forms of `SoftmaxCall.attend`."""

    def weigh(query, key):
        distance = ops.arange(query.shape[1])[:, None] - ops.arange(key.shape[1])
        near = ops.abs(distance) < config.window
        if options.causal:
            near = ops.logical_and(near, distance >= 0)
        distance = ops.abs(distance)
        by_query = ops.cast(spans, query.dtype)
        if len(spans.shape) == 1:
            by_query = by_query[None, None]
        # (batch or 1, heads, queries or 1)
        by_query = ops.swapaxes(by_query, 1, 2)
        mask = ops.where(near, soft_mask(by_query, distance, config), 0.0)
        query = query * options.scale
        logits = dense_products(query, key)
        if position_key is not None:
            table = ops.cast(position_key, query.dtype)
            rows = ops.take(table, ops.clip(distance, 0, table.shape[0] - 1), axis=0)
            logits = logits + ops.einsum("bthd,tsd->bhts", query, rows)
        return logits, mask

    return dense_attention(inputs, weigh)
