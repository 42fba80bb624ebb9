"""Attention with a soft mask over distances: the definition."""

from keras import ops

from keras_efficient_attn.ops.adaptive_span.bands import soft_mask
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divided


def reference_attention(inputs, spans, position_key, config, options):
    """Quadratic, from the formula.

    Args:
        inputs: `(query, key, value, key_mask)`.
        spans, position_key: As for `adaptive_span_attention`.
        config: `SpanConfig`.
        options: `SoftmaxOptions`.
    """
    query, key, value, key_mask = inputs
    dtype = accumulator_dtype(query, key, value)
    query, key, value, spans = (ops.cast(t, dtype) for t in (query, key, value, spans))
    distance = ops.arange(query.shape[1])[:, None] - ops.arange(key.shape[1])
    near = ops.abs(distance) < config.window
    if options.causal:
        near = ops.logical_and(near, distance >= 0)
    # (batch or 1, heads, queries or 1)
    spans = ops.swapaxes(spans if len(spans.shape) == 3 else spans[None, None], 1, 2)
    mask = ops.where(near, soft_mask(spans, ops.abs(distance), config.ramp), 0.0)
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")
        mask = ops.where(kept[:, None, None, :], mask, 0.0)
        key, value = (ops.where(kept[..., None, None], t, 0.0) for t in (key, value))
    logits = ops.einsum("bthd,bshd->bhts", query, key)
    if position_key is not None:
        table = ops.cast(position_key, dtype)
        rows = ops.clip(ops.abs(distance), 0, table.shape[0] - 1)
        rows = ops.take(table, rows, axis=0)
        logits = logits + ops.einsum("bthd,tsd->bhts", query, rows)
    logits = ops.where(mask > 0, logits * options.scale, LOG_ZERO)
    weights = mask * ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    return divided(values, ops.swapaxes(ops.sum(weights, axis=-1), 1, 2))
