"""The kernel from products of the sines and cosines of queries and keys.

The sine of a difference is `sin a cos b − cos a sin b`, so that a pair costs a few
multiplications per dimension and no transcendental function. Near 0, where this loses
precision, sin(z)/z is computed by its Taylor series. See `kernel.Kernel` for the
functions.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.numerics import cosine, sine, where, wide_dtype
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.fourier.kernel import SLOTS

# Below this z², use the series.
NEAR = 0.25
# Terms of sin(z)/z in z², for rounding errors of float32 and float64 at `NEAR`.
TERMS = {"float32": 4, "float64": 8}


def prepare(angles):
    """`(angles, sines, cosines)`, the latter two without gradient."""
    constant = ops.stop_gradient(angles)
    return angles, sine(constant), cosine(constant)


def log_kernel(query, keys):
    series = _series(keras.backend.standardize_dtype(query[0].dtype))
    top = bottom = 1.0
    for slot in range(SLOTS):
        z, sin_z, _ = _differences(query, keys, slot)
        square = z * z
        near = square < NEAR
        top = top * ops.where(near, _polynomial(series, square), sin_z)
        bottom = bottom * ops.where(near, 1.0, z)
    product = ops.abs(top / bottom)
    seen = product > 0.0
    logs = where(seen, ops.log(ops.where(seen, product, 1.0)), LOG_ZERO)
    return ops.sum(logs, axis=2)


def log_kernel_gradient(query, keys, grad_logs):
    dtype = keras.backend.standardize_dtype(grad_logs.dtype)
    unit = float(np.finfo(dtype).eps)
    series = _series(dtype)
    slope = [2.0 * i * c for i, c in enumerate(series)][1:]
    grad_logs = grad_logs[:, :, None]
    grad_query, grad_key = [], []
    for slot in range(SLOTS):
        z, sin_z, cos_z = _differences(query, keys, slot, with_cosine=True)
        square = z * z
        near = square < NEAR
        size = sin_z * sin_z + unit**2
        top = ops.where(near, z * _polynomial(slope, square), sin_z * cos_z * z - size)
        bottom = ops.where(near, _polynomial(series, square), size * z)
        grad_z = grad_logs * (top / bottom)
        grad_query.append(ops.sum(grad_z, axis=-1))
        grad_key.append(-ops.sum(grad_z, axis=-2))
    return ops.stack(grad_query), ops.stack(grad_key)


def _differences(query, keys, slot, with_cosine=False):
    """`(z, sin z, cos z or None)` of one dimension in `SLOTS`, for all pairs."""
    a, sin_a, cos_a = (x[slot][..., :, None] for x in query)
    b, sin_b, cos_b = (x[slot][..., None, :] for x in keys)
    sin_z = sin_a * cos_b - cos_a * sin_b
    cos_z = cos_a * cos_b + sin_a * sin_b if with_cosine else None
    return a - b, sin_z, cos_z


def _series(dtype):
    """Coefficients of sin(z)/z in powers of z²."""
    terms = TERMS[wide_dtype(dtype)]
    return [(-1.0) ** i / math.factorial(2 * i + 1) for i in range(terms)]


def _polynomial(coefficients, x):
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value
