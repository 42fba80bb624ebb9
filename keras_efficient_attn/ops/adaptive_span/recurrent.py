"""Attention with a span for one position, over the keys of a state."""

from keras import ops

from keras_efficient_attn.ops.adaptive_span.bands import soft_mask
from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import masked_inputs
from keras_efficient_attn.ops.common.recent_keys import (
    append_segment,
    drop_oldest,
    fit_recent,
)
from keras_efficient_attn.ops.common.single_query import attend_single


@jit_on_jax("config", "options")
def attend_next(inputs, spans, position_key, state, seed, config, options):
    """Computes `attend_in_bands` for one position and a state."""
    query, *segment = masked_inputs(*inputs)
    query = query * options.scale
    past = append_segment(fit_recent(state, config.window - 1), *segment)
    key, value, valid = past
    # (batch or 1, heads, 1)
    spans = ops.cast(spans, query.dtype)
    spans = spans[None, :, None] if len(spans.shape) == 1 else ops.swapaxes(spans, 1, 2)
    distance = ops.arange(config.window - 1, -1, -1, dtype="int32")
    mask = soft_mask(spans, distance[None], config)
    allowed = ops.logical_and(valid[:, None, None] > 0, mask > 0)
    logits = ops.log(ops.where(mask > 0, mask, 1.0))
    if position_key is not None:
        by_key = ops.flip(ops.cast(position_key, query.dtype), axis=0)
        logits = logits + ops.einsum("bqhd,kd->bhqk", query, by_key)
    output = attend_single(
        query, key, value, allowed, options.dropout_and_seed(seed), logits
    )
    return output, drop_oldest(past, 1, state["position"])
