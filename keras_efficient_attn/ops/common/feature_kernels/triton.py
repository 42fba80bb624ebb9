"""Causal linear attention in kernels for NVIDIA GPUs, written in Triton, for PyTorch.

With `TRITON_INTERPRET=1` in the environment before Triton is imported, Triton
interprets them on any device: the same results, slowly, for tests.
"""

import torch
from keras import ops

from keras_efficient_attn.ops.common.feature_kernels.entrywise import Entrywise
from keras_efficient_attn.ops.common.feature_kernels.triton_op import (
    linear_attention_op,
)
from keras_efficient_attn.ops.common.online_softmax import (
    bounded_log_weight,
    finish,
    sum_of_scales,
)


def linear_attention(
    query, key, value, config, map_weights, key_log_weight, key_mask, state
):
    """Causal attention with feature maps, for calls that `choose_kernel` accepts.

    Normalized outputs have the dtype of `value`. `torch.autocast` does not change the
    dtypes: products use bfloat16 if `value` is bfloat16.
    """
    # Computations outside the kernels, such as features, are float32.
    with torch.autocast(query.device.type, enabled=False):
        return _linear_attention(
            (query, key, value), config, map_weights, key_log_weight, key_mask, state
        )


def _linear_attention(tensors, config, map_weights, key_log_weight, key_mask, state):
    query, key, value = tensors
    key_mask = None if key_mask is None else ops.cast(key_mask, "bool")
    if key_mask is not None:
        # Kernels mask their inputs, but maps and log scales read keys before them.
        key = ops.where(key_mask[..., None, None], key, 0.0)
    weights = tuple(ops.cast(weight, "float32") for weight in map_weights)
    query, queries = _map(query, config, config.query_map, weights)
    key, keys = _map(key, config, config.key_map, weights)

    log_weight = keys.log_scale
    if key_log_weight is not None:
        key_log_weight = ops.cast(key_log_weight, "float32")
        log_weight = sum_of_scales(key_log_weight, log_weight)
    if log_weight is None and (key_mask is not None or state is not None):
        # A state may have another scale than unweighted keys.
        log_weight = torch.zeros(key.shape[:3], device=key.device)
    if log_weight is not None:
        log_weight = bounded_log_weight(log_weight, key_mask).transpose(1, 2)
    first = log_scale = None
    if state is not None:
        sums, normalizer, log_scale = (
            ops.cast(state[name], "float32")
            for name in ("sum", "normalizer", "log_scale")
        )
        first = torch.cat([sums.flatten(2), normalizer], -1)

    normalized = config.output == "normalized"
    options = queries.entry, "normalized" if normalized else "partial"
    tensors = query, key, value, queries.rows, log_weight, first, log_scale
    values, totals, scale, last, log_scale = linear_attention_op(
        *tensors, " ".join(options)
    )
    new_state = None
    if state is not None:
        split = config.num_features * value.shape[-1]
        new_state = {
            "sum": last[..., :split].unflatten(-1, (-1, value.shape[-1])),
            "normalizer": last[..., split:],
            "log_scale": log_scale,
        }
    if normalized:
        return (values,), new_state
    totals, scale = totals.transpose(1, 2), scale.transpose(1, 2)
    if queries.log_scale is not None:
        scale = scale + queries.log_scale
    if config.output == "partial":
        return (values, totals, scale), new_state
    return (finish(values, totals, scale, False),), new_state


def _map(x, config, function, weights):
    """The kernels' input for queries or keys, and the map that they apply to it.

    Features are computed here if no kernel has their map, or if the gradient of its
    rows is required, which no kernel computes.
    """
    if config.entrywise is not None and not any(w.requires_grad for w in weights):
        mapped = config.entrywise(x, *weights)
        if mapped is not None:
            return x, mapped
    features, log_scale = function(x.float().transpose(1, 2)[:, :, None], *weights)
    features = features[:, :, 0].transpose(1, 2)
    if log_scale is not None:
        shape = features.shape[:3]
        log_scale = log_scale[:, :, 0].transpose(1, 2).expand(shape)
    return features, Entrywise("identity", log_scale=log_scale)
