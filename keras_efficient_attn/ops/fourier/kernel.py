"""The logarithm of the Fourier kernel for tiles of queries and keys.

```
L[t, s] = Σ_d log|sin(z_d) / z_d|,   z = a[t] − b[s]
```

The sine of a difference is `sin a cos b − cos a sin b`, so that a pair costs a few
multiplications a dimension and no transcendental function; near 0, where that loses its
digits, sin(z)/z is its Taylor series. Factors of `SLOTS` dimensions are multiplied
before the one logarithm. Arrays of queries and keys have the shape `(SLOTS, batch,
heads, dims / SLOTS, length)`, from `split_dims`.
"""

import functools
import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.compiled import compiled_on_torch
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

POWERS = (2, 4, 6, 8)
# A product of this many sin(z)/z stays in the range of float32 up to z of 1e9.
SLOTS = 4
# Keys at once of what PyTorch compiles, so that they stay in the cache.
BLOCK = 512
# Below this z², the series.
NEAR = 0.25
# Of sin(z)/z in z², for rounding errors of float32 and float64 at `NEAR`.
TERMS = {"float32": 4, "float64": 8}


def check_power(power):
    """Raises `ValueError` for a power that the kernel does not have."""
    if power not in POWERS:
        raise ValueError(f"`power` must be one of {POWERS}. Received: power={power!r}")


def split_dims(x):
    """`(batch, length, heads, dim)` as `(SLOTS, batch, heads, dims / SLOTS, length)`.

    Zeros fill the last dimensions up: their factor is sin(0)/0 = 1.
    """
    batch, length, heads, dim = ops.shape(x)
    if dim % SLOTS:
        x = ops.pad(x, [(0, 0)] * 3 + [(0, -dim % SLOTS)])
    x = ops.reshape(x, (batch, length, heads, SLOTS, -(-dim // SLOTS)))
    return ops.transpose(x, (3, 0, 2, 4, 1))


def join_dims(x, dim):
    """The inverse of `split_dims`."""
    slots, batch, heads, groups, length = ops.shape(x)
    x = ops.transpose(x, (1, 4, 2, 0, 3))
    return ops.reshape(x, (batch, length, heads, slots * groups))[..., :dim]


def with_sines(angles, fused):
    """`(angles, sines, cosines)`.

    The angles alone for PyTorch without `fused`, whose kernel has its own way.
    """
    if keras.backend.backend() == "torch":
        if not fused:
            return (angles,)
        # The compiler would keep the order of the axes, and read with strides.
        angles = angles.contiguous()
    # JAX alone has second derivatives, which need those of the sines.
    jax = keras.backend.backend() == "jax"
    constant = angles if jax else ops.stop_gradient(angles)
    return angles, sine(constant), cosine(constant)


def log_kernel(query, keys):
    """`L`, `(batch, heads, queries, keys)`; `LOG_ZERO` or less where the kernel is 0.

    Args:
        query: `with_sines` of queries times their radius.
        keys: `with_sines` of keys times their radius.
    """
    if len(query) == 1:
        return _torch_kernel().log_kernel(*query, *keys)
    if keras.backend.backend() == "jax":
        return _with_gradient_on_jax()(query, keys)
    if keras.backend.backend() == "torch":
        blocks = [_fused_log_kernel(query, block) for block in _blocks(keys)]
        return ops.concatenate(blocks, axis=-1)
    return _fused_log_kernel(query, keys)


def log_kernel_gradient(query, keys, grad_logs):
    """Gradients of the angles of queries and keys from that of `L`.

    The derivative of `log|sin(z)/z|` is `cot z − 1/z`. Where the sine is not known from
    zero, the cotangent has the sign and size that its rounding error leaves it: what it
    multiplies, a weight with an even power of the sine, is 0 in the limit.
    """
    if len(query) == 1:
        return _torch_kernel().log_kernel_gradient(*query, *keys, grad_logs)
    if keras.backend.backend() == "torch":
        blocks = [
            _fused_gradient(query, block, grad_block)
            for block, (grad_block,) in zip(
                _blocks(keys), _blocks((grad_logs,)), strict=True
            )
        ]
        grad_query, grad_key = zip(*blocks, strict=True)
        return sum(grad_query), ops.concatenate(grad_key, axis=-1)
    return _fused_gradient(query, keys, grad_logs)


@compiled_on_torch
def _fused_gradient(query, keys, grad_logs):
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


def _blocks(tensors):
    """The tensors, cut along their last axis to what stays in the cache."""
    return list(zip(*(t.split(BLOCK, dim=-1) for t in tensors), strict=True))


def _torch_kernel():
    from keras_efficient_attn.ops.fourier import torch_kernel

    return torch_kernel


@compiled_on_torch
def _fused_log_kernel(query, keys):
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
    logs = ops.where(seen, ops.log(ops.where(seen, product, 1.0)), LOG_ZERO)
    return ops.sum(logs, axis=2)


def _differences(query, keys, slot, with_cosine=False):
    """`(z, sin z, cos z or None)` of one dimension in `SLOTS`, for all pairs."""
    a, sin_a, cos_a = (x[slot][..., :, None] for x in query)
    b, sin_b, cos_b = (x[slot][..., None, :] for x in keys)
    sin_z = sin_a * cos_b - cos_a * sin_b
    cos_z = cos_a * cos_b + sin_a * sin_b if with_cosine else None
    return a - b, sin_z, cos_z


def _series(dtype):
    """Coefficients of sin(z)/z in powers of z²."""
    terms = TERMS["float64" if dtype == "float64" else "float32"]
    return [(-1.0) ** i / math.factorial(2 * i + 1) for i in range(terms)]


def _polynomial(coefficients, x):
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


@functools.cache
def _with_gradient_on_jax():
    # JAX would derive the product of the factors, and divide by each again.
    import jax

    function = jax.custom_vjp(_fused_log_kernel)

    def forward(query, keys):
        return _fused_log_kernel(query, keys), (query, keys)

    def backward(saved, grad_logs):
        query, keys = saved
        grad_query, grad_key = log_kernel_gradient(query, keys, grad_logs)
        # That of the angles is the whole one, the sines' and cosines' included.
        zeros = (map(ops.zeros_like, side[1:]) for side in (query, keys))
        return tuple(
            (first, *rest)
            for first, rest in zip((grad_query, grad_key), zeros, strict=True)
        )

    function.defvjp(forward, backward)
    return function


def sine(x):
    """`ops.sin`, which on JAX rounds float64 to float32."""
    return _elementwise("sin", x)


def cosine(x):
    """`ops.cos`, which on JAX rounds float64 to float32."""
    return _elementwise("cos", x)


def _elementwise(name, x):
    if keras.backend.backend() == "jax":
        import jax.numpy

        return getattr(jax.numpy, name)(x)
    return getattr(ops, name)(x)
