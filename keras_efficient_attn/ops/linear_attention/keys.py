"""Features of keys with a mask and log weights."""

from keras import ops

from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, sum_of_scales


def mapped_keys(key_map, key, rest, map_weights, masked):
    """Features of keys, zero for missing keys, and log weights or `None`.

    Args:
        key_map, map_weights: As for `causal_linear_attention`.
        key: `(batch, heads, chunks, chunk_size, dim)`.
        rest: Further tensors of the keys, with a last axis of 1: `valid` if `masked`,
            then optionally a log weight.
        masked: Boolean.
    """
    key, log_weight = key_map(key, *map_weights)
    rest = [t[..., 0] for t in rest]
    valid = rest.pop(0) if masked else None
    if rest:
        (explicit,) = rest
        seen = ops.cast(explicit > LOG_ZERO, key.dtype)
        valid = seen if valid is None else valid * seen
        log_weight = sum_of_scales(log_weight, explicit)
    if valid is not None:
        key = key * valid[..., None]
        if log_weight is not None:
            log_weight = ops.where(valid > 0, log_weight, LOG_ZERO)
    return key, log_weight
