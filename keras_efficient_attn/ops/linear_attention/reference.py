"""The quadratic definition of linear attention."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    max_along,
    where,
)
from keras_efficient_attn.ops.common.online_softmax import (
    LOG_ZERO,
    bounded_log_weight,
    divide,
)


def reference_attention(inputs, key_log_weight, causal, normalize):
    """Weights `w[t, s] = exp(l[s]) φq[t]·φk[s]`; output `Σ w v / Σ w`, or `Σ w v`.

    Arguments are as for `ops.linear_attention`; `inputs` are `(query_features,
    key_features, value, key_mask)`. The `(query_length, key_length)` weights are
    formed, in the accumulator's dtype.
    """
    *tensors, key_mask = inputs
    dtype = accumulator_dtype(*tensors)
    query_features, key_features, value = (ops.cast(t, dtype) for t in tensors)
    key_features = hide_masked(key_features, key_mask)
    value = hide_masked(value, key_mask)
    weights = ops.einsum("bthm,bshm->bhts", query_features, key_features)
    allowed = ops.ones_like(weights, dtype="bool")
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")
        allowed = allowed & kept[:, None, None, :]
    if causal:
        rows = ops.arange(shape_of(query_features)[1])[:, None]
        columns = ops.arange(shape_of(key_features)[1])[None, :]
        allowed = allowed & (rows >= columns)
    if key_log_weight is not None:
        logs = bounded_log_weight(ops.cast(key_log_weight, dtype), key_mask)
        logs = ops.transpose(logs, (0, 2, 1))[:, :, None, :]
        allowed = allowed & (logs > LOG_ZERO)
        logs = where(allowed, logs, LOG_ZERO)
        if normalize:
            logs = logs - max_along(
                ops.stop_gradient(logs), axis=-1, keepdims=True, initial=LOG_ZERO
            )
        weights = weights * ops.exp(logs)
    weights = ops.where(allowed, weights, 0.0)
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    if not normalize:
        return values
    return divide(values, ops.transpose(ops.sum(weights, axis=-1), (0, 2, 1)))
