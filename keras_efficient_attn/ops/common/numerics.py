"""Accumulator dtypes, and replacements for defective Keras operations."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, is_traced_by_torch, pick
from keras_efficient_attn.ops.common.plan import device_kind

if BACKEND == "torch":
    import torch
elif BACKEND == "tensorflow":
    import tensorflow as tf

# Entries whose maximum is taken before their index.
_GROUP = 16


def accumulator_dtype(*tensors):
    """float64 if one of the tensors is float64, else float32."""
    dtypes = {keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors}
    return "float64" if "float64" in dtypes else "float32"


def wide_dtype(dtype):
    """float64 for float64, float32 for any other dtype."""
    return "float64" if dtype == "float64" else "float32"


def larger(first, second):
    """The elementwise maximum. `ops.maximum` casts float64 to float32 on PyTorch."""
    return ops.where(first > second, first, second)


# The maximum of a tensor and a number, in the dtype of the tensor.
at_least = torch.clamp if BACKEND == "torch" else ops.maximum

# `ops.where` of a tensor and a number, which Keras rounds to `floatx` on PyTorch.
where = torch.where if BACKEND == "torch" else ops.where


def _max_on_torch(x, axis, keepdims=False, initial=None):
    """`ops.max`, which `torch.compile` does not trace everywhere.

    With `initial`, Keras reads a number from a tensor there.
    """
    x = ops.convert_to_tensor(x)
    if initial is None:
        return x.amax(axis, keepdims)
    if not x.numel():
        # PyTorch has no maximum of no entries.
        return x.sum(axis, keepdims) + initial
    return x.amax(axis, keepdims).clamp(min=initial)


def _max_on_tensorflow(x, axis, keepdims=False, initial=None):
    """`ops.max`, which refuses tensors without entries."""
    largest = tf.reduce_max(x, axis, keepdims)
    return largest if initial is None else tf.maximum(largest, initial)


max_along = pick(ops.max, torch=_max_on_torch, tensorflow=_max_on_tensorflow)


def greatest_index(x):
    """int32 index of the greatest entry along the last axis.

    On TensorFlow and JAX, Keras distinguishes −0 from 0 by their bits, in additional
    passes over `x`; ONNX and LiteRT have no operator for this, and on JAX it rounds
    float64 to float32.
    """
    if BACKEND == "tensorflow":
        return tf.argmax(x, axis=-1, output_type=tf.int32)
    if BACKEND == "torch":
        return ops.cast(ops.argmax(x, axis=-1), "int32")
    import jax.numpy as jnp

    *rest, size = x.shape
    if device_kind() != "cpu" or size < 4 * _GROUP or size % _GROUP:
        return jnp.argmax(x, axis=-1).astype("int32")
    # The maxima of groups, and then the index within the greatest group: on CPUs, XLA
    # compares the entries of an argmax one by one, those of a maximum at once.
    x = jnp.reshape(x, (*rest, size // _GROUP, _GROUP))
    group = jnp.argmax(jnp.max(x, axis=-1), axis=-1).astype("int32")
    x = jnp.take_along_axis(x, group[..., None, None], axis=-2)[..., 0, :]
    return group * _GROUP + jnp.argmax(x, axis=-1).astype("int32")


def conditional(predicate, compute, otherwise):
    """`compute()` if a scalar is true, and else the tensor `otherwise`; no gradient.

    On PyTorch `ops.cond` reads the value, which `torch.compile` does not have, so both
    branches are computed there.
    """
    if is_traced_by_torch():
        return ops.where(predicate, compute(), otherwise)
    return ops.cond(predicate, compute, lambda: otherwise)


def sum_rows(x, index, number):
    """The sums of the rows `(rows, dim)` that have the same index: `(number, dim)`.

    On PyTorch `ops.segment_sum` reads a number from a tensor, which breaks
    `torch.compile`'s graph.
    """
    if BACKEND == "torch":
        # Several times faster than `scatter_add`, which adds entry by entry.
        return x.new_zeros(number, x.shape[1]).index_add(0, index.long(), x)
    return ops.segment_sum(x, index, num_segments=number)


def write_rows(x, index, rows):
    """`x` `(number, ...)` with other rows at indices `(count,)`, which must be valid.

    On JAX, `ops.scatter_update` makes its index anew, in eight more operations.
    """
    if BACKEND == "jax":
        import jax

        axes = tuple(range(1, len(x.shape)))
        numbers = jax.lax.ScatterDimensionNumbers(axes, (0,), (0,))
        return jax.lax.scatter(x, index[:, None], rows, numbers)
    return ops.scatter_update(x, index[:, None], rows)


# The sums along an axis. `ops.cumsum` casts float64 to float32 on PyTorch.
cumulative_sum = torch.cumsum if BACKEND == "torch" else ops.cumsum


def pad(x, widths):
    """`x` padded with zeros along each axis, by pairs of widths.

    `ops.pad` creates a numbered Keras operation per call, so that `torch.compile` would
    compile for each number.
    """
    if BACKEND == "torch":
        import torch

        return torch.nn.functional.pad(
            ops.convert_to_tensor(x), [n for pair in reversed(widths) for n in pair]
        )
    return ops.pad(x, widths)


def mean_of_channels(x):
    """The mean along the last axis, kept. `ops.mean` rounds float64 to float32."""
    return ops.sum(x, axis=-1, keepdims=True) / x.shape[-1]


def inner_products(first, second):
    """`Σ_i first[..., i] second[..., i]`, with the last axis kept.

    XLA's sum of such products takes seven times as long as a contraction on CPUs.
    """
    if BACKEND == "jax" and device_kind() == "cpu":
        return ops.einsum("...i,...i->...", first, second)[..., None]
    return ops.sum(first * second, axis=-1, keepdims=True)


def norm_of_heads(x, gain, epsilon, centered, dtype):
    """`gain (x − μ) / √(mean of (x − μ)² + epsilon)` along the last axis.

    Computed in the dtype of accumulators. Vectors of 0 have no direction: their
    gradients are 0, because behind a norm of queries the derivatives of the two norms
    at 0 would multiply.

    Args:
        x: `(..., heads, dim)`.
        gain: `(heads, dim)`, `(dim,)` or `None`.
        epsilon: Positive number.
        centered: Whether μ is the mean of the vector; it is 0 otherwise.
        dtype: Of the result, and so of its gradient, which programs keep.
    """
    x = ops.cast(x, accumulator_dtype(x))
    if centered:
        x = x - mean_of_channels(x)
    power = ops.sum(ops.square(x), axis=-1, keepdims=True) / x.shape[-1]
    x = x * (ops.sign(power) * ops.rsqrt(power + epsilon))
    return ops.cast(x if gain is None else x * ops.cast(gain, x.dtype), dtype)


# `x * factor` for factors `(..., 1)`, whose gradient is an `inner_products`.
scale_vectors = ops.multiply
if BACKEND == "jax":
    import jax

    scale_vectors = jax.custom_vjp(jax.numpy.multiply)

    def _scale_forward(x, factor):
        return x * factor, (x, factor)

    def _scale_backward(kept, grad):
        x, factor = kept
        return grad * factor, inner_products(x, grad)

    scale_vectors.defvjp(_scale_forward, _scale_backward)
    # XLA passes over the heads more often for the derivative of each step.
    norm_of_heads = jax.custom_vjp(norm_of_heads, nondiff_argnums=(2, 3, 4))

    def _norm_forward(x, gain, epsilon, centered, dtype):
        wide = x.astype(accumulator_dtype(x))
        power, mean = mean_of_channels(jax.numpy.square(wide)), None
        if centered:
            # Both sums in one pass, as in Keras' norms.
            mean = mean_of_channels(wide)
            power = jax.numpy.maximum(power - mean * mean, 0)
            wide = wide - mean
        inverse = jax.numpy.sign(power) * jax.lax.rsqrt(power + epsilon)
        y = wide * inverse
        y = y if gain is None else y * gain.astype(y.dtype)
        return y.astype(dtype), (x, gain, mean, inverse)

    def _norm_backward(epsilon, centered, dtype, kept, grad):
        x, gain, mean, inverse = kept
        # Otherwise XLA computes both anew in a slow sum; without a mean, on CPUs only.
        if centered or device_kind() == "cpu":
            x, grad = jax.lax.optimization_barrier((x, grad))
        grad = grad.astype(accumulator_dtype(x))
        wide = x.astype(grad.dtype)
        y = (wide - mean if centered else wide) * inverse
        grad_gain = None
        if gain is not None:
            axes = tuple(range(x.ndim - gain.ndim))
            grad_gain = (grad * y).sum(axes).astype(gain.dtype)
            grad = grad * gain.astype(grad.dtype)
        grad_x = grad - y * inner_products(grad, y) / x.shape[-1]
        if centered:
            grad_x = grad_x - mean_of_channels(grad)
        return (grad_x * inverse).astype(x.dtype), grad_gain

    norm_of_heads.defvjp(_norm_forward, _norm_backward)


# Added to the mean square of a vector that is divided by its norm. Its root bounds the
# derivative at zero: if it is much smaller, a row of zeros has gradients thousands of
# times those of others.
NORM_EPSILON = 1e-3


def rms_normalize(x, epsilon=NORM_EPSILON):
    """`x` with a root mean square of 1 along its last axis, in the dtype of `x`."""
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return x * ops.rsqrt(squares / x.shape[-1] + epsilon)


def unit_vectors(x, dim=None):
    """`rms_normalize(x) / √dim`: of norm 1, or less near zero.

    `dim` is needed where the shape of `x` does not say it.
    """
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return x * ops.rsqrt(squares + NORM_EPSILON * (dim or x.shape[-1]))


def matrix_product(x, kernel):
    """`x @ kernel`, which on PyTorch Keras rounds from float64 to float32."""
    if BACKEND == "torch":
        return ops.convert_to_tensor(x) @ ops.convert_to_tensor(kernel)
    return ops.matmul(x, kernel)


def sine(x):
    """`ops.sin`, which on JAX rounds float64 to float32."""
    return _elementwise("sin", x)


def cosine(x):
    """`ops.cos`, which on JAX rounds float64 to float32."""
    return _elementwise("cos", x)


def hyperbolic_tangent(x):
    """`ops.tanh`, which on JAX rounds float64 to float32."""
    return _elementwise("tanh", x)


def _elementwise(name, x):
    if BACKEND == "jax":
        import jax.numpy

        return getattr(jax.numpy, name)(x)
    return getattr(ops, name)(x)
