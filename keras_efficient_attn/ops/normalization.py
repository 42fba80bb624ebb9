"""Normalisation without weights."""

from keras import ops


def rms_normalize(x):
    """`x` with a root mean square of 1 along its last axis, in the dtype of `x`."""
    mean = ops.sum(ops.square(x), axis=-1, keepdims=True) / x.shape[-1]
    return x * ops.rsqrt(mean + 1e-6)
