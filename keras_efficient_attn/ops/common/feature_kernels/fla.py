"""Linear attention by `flash-linear-attention`, if installed.

Its sums over keys have no weights and no totals. Here masked keys get zero features,
and an additional value column of ones gives the totals.
"""

import torch
from keras import ops

from keras_efficient_attn.ops.common.derivatives_torch import first_derivatives_only
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.online_softmax import finish


def linear_attention(
    query, key, value, config, map_weights, key_log_weight, key_mask, state
):
    """Attention with feature maps, for calls that `choose_kernel` accepts."""
    from fla.ops.simple_gla import chunk_simple_gla

    if key_log_weight is not None:
        raise ValueError(
            "implementation='fla' does not support `key_log_weight`: leave out one of "
            "the two. Received: both"
        )
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    with torch.autocast(query.device.type, enabled=False):
        query = _features(query, config.query_map, map_weights, value.dtype)
        key = _features(key, config.key_map, map_weights, value.dtype)
        key = hide_masked(key, key_mask)
        first = None
        if state is not None:
            sums, normalizer, log_scale = (
                ops.cast(state[name], "float32")
                for name in ("sum", "normalizer", "log_scale")
            )
            first = torch.cat([sums, normalizer[..., None]], -1)
            first = first * log_scale.exp()[..., None, None]
        values, last = chunk_simple_gla(
            query,
            key,
            torch.cat([value, torch.ones_like(value[..., :1])], -1),
            scale=1.0,
            initial_state=first,
            output_final_state=state is not None,
        )
    first_derivatives_only(values, last)
    values, totals = values[..., :-1].float(), values[..., -1].float()
    new_state = None
    if state is not None:
        new_state = {
            "sum": last[..., :-1],
            "normalizer": last[..., -1],
            "log_scale": torch.zeros_like(log_scale),
        }
    if config.output == "partial":
        return (values, totals, torch.zeros_like(totals)), new_state
    normalize = config.output == "normalized"
    output = finish(values, totals, torch.zeros_like(totals), normalize)
    return (output,), new_state


def _features(x, function, map_weights, dtype):
    weights = tuple(ops.cast(weight, "float32") for weight in map_weights)
    features, log_scale = function(x.float().transpose(1, 2)[:, :, None], *weights)
    if log_scale is not None:
        raise ValueError(
            "implementation='fla' needs a feature map without a log scale, such as "
            "'elu' with heads of at least 16. Received: a map with a log scale, and "
            f"heads of {x.shape[-1]}"
        )
    return features[:, :, 0].transpose(1, 2).to(dtype)
