"""The quadratic definition of Fourier attention."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.dense_softmax import dense_attention
from keras_efficient_attn.ops.common.numerics import sine, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO


def fourier_attention(
    query, key, value, radius, power=4, key_mask=None, causal=False, first_position=0
):
    """Weights `w[t, s] = Π_d (sin z_d / z_d)^power`, `z = R ∘ (q[t] − k[s])`.

    Arguments and shapes are as for `ops.fourier_attention`. All pairs of queries and
    keys with all their dimensions are formed, in the accumulator's dtype.
    """

    def weigh(query, key):
        z = ops.cast(radius, query.dtype) * (query[:, :, None] - key[:, None])
        zero = z == 0.0
        z = ops.where(zero, 1.0, z)
        ratio = ops.abs(ops.where(zero, 1.0, sine(z) / z))
        seen = ratio > 0.0
        logs = where(seen, ops.log(ops.where(seen, ratio, 1.0)), LOG_ZERO)
        logs = power * ops.transpose(ops.sum(logs, axis=-1), (0, 3, 1, 2))
        seen = logs > LOG_ZERO
        if causal:
            first = ops.reshape(ops.cast(first_position, "int32"), (-1, 1, 1, 1))
            rows = first + ops.arange(shape_of(query)[1], dtype="int32")[:, None]
            columns = ops.arange(shape_of(key)[1], dtype="int32")
            seen = ops.logical_and(seen, rows >= columns)
        return logs, seen

    return dense_attention((query, key, value, key_mask), weigh)
