"""The quadratic definition of Fourier attention."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    max_along,
    sine,
    where,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide


def fourier_attention(
    query, key, value, radius, power=4, key_mask=None, causal=False, first_position=0
):
    """Weights `w[t, s] = Π_d (sin z_d / z_d)^power`, `z = R ∘ (q[t] − k[s])`.

    Arguments and shapes are as for `ops.fourier_attention`. All pairs of queries and
    keys with all their dimensions are formed, in the accumulator's dtype.
    """
    dtype = accumulator_dtype(query, key, value)
    radius, query, key, value = (
        ops.cast(x, dtype) for x in (radius, query, key, value)
    )
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    z = radius * (query[:, :, None] - key[:, None])
    zero = z == 0.0
    z = ops.where(zero, 1.0, z)
    ratio = ops.abs(ops.where(zero, 1.0, sine(z) / z))
    seen = ratio > 0.0
    logs = where(seen, ops.log(ops.where(seen, ratio, 1.0)), LOG_ZERO)
    logs = power * ops.transpose(ops.sum(logs, axis=-1), (0, 3, 1, 2))
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")
        logs = where(kept[:, None, None, :], logs, LOG_ZERO)
    if causal:
        first = ops.reshape(ops.cast(first_position, "int32"), (-1, 1, 1, 1))
        rows = first + ops.arange(shape_of(query)[1], dtype="int32")[:, None]
        columns = ops.arange(shape_of(key)[1], dtype="int32")
        logs = where(rows >= columns, logs, LOG_ZERO)
    largest = max_along(
        ops.stop_gradient(logs), axis=-1, keepdims=True, initial=LOG_ZERO
    )
    weights = ops.where(logs > LOG_ZERO, ops.exp(logs - largest), 0.0)
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    return divide(values, ops.transpose(ops.sum(weights, axis=-1), (0, 2, 1)))
