"""Compiled functions of arrays and their gradients, on the current backend."""

import contextlib
import functools

import keras
import numpy as np
from keras import ops


def to_numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def float64():
    """A context in which the backend computes in float64."""
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)


def gradient_function(function, with_value=False, xla=False):
    """A compiled callable: arrays to the gradients of the scalar `function`.

    Keep it for several calls: JAX and TensorFlow compile once per callable.
    `with_value` puts the value of `function` before the gradients. With `xla`,
    TensorFlow compiles by XLA, as JAX always does.
    """
    tensorflow = functools.partial(_tensorflow, xla=xla)
    makers = {"jax": _jax, "tensorflow": tensorflow, "torch": _torch}
    differentiate = makers[keras.backend.backend()](function)

    def call(*arrays):
        tensors = tuple(ops.convert_to_tensor(array) for array in arrays)
        results = [to_numpy(tensor) for tensor in differentiate(*tensors)]
        return results if with_value else results[1:]

    return call


def compile_step(function, xla=False):
    """`function` of tensors, compiled for their shapes; unchanged on PyTorch.

    With `xla`, TensorFlow compiles by XLA, as JAX always does.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False, jit_compile=xla or None)
    return function


def gradients(function, *arrays, xla=False):
    """The gradients at `arrays`; TensorFlow traces only for XLA."""
    if keras.backend.backend() == "tensorflow" and not xla:
        _, *results = _differentiate_by_tape(function)(
            *map(ops.convert_to_tensor, arrays)
        )
        return [to_numpy(tensor) for tensor in results]
    return gradient_function(function, xla=xla)(*arrays)


def assert_slope(gradient, definition, arrays, i=0, step=1e-5, tolerance=1e-5):
    """Compares a gradient with a central difference along a random direction.

    Args:
        gradient: Of `arrays[i]`.
        definition: Maps the arrays, in float64, to a scalar.
        arrays: Where the gradient was taken.
        step: Of the difference.
        tolerance: Of the slope, as a fraction of the norms of gradient and direction.
    """
    direction = np.random.default_rng([7, i]).normal(size=arrays[i].shape)

    def value(shift):
        moved = [x.astype("float64") for x in arrays]
        moved[i] += shift * direction
        return definition(*moved)

    slope = (value(step) - value(-step)) / (2 * step)
    size = np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert size > 0
    assert abs((gradient * direction).sum() - slope) < tolerance * size


def _jax(function):
    import jax

    @jax.jit
    def differentiate(*tensors):
        every = tuple(range(len(tensors)))
        value, gradients = jax.value_and_grad(function, argnums=every)(*tensors)
        return value, *gradients

    return differentiate


def _tensorflow(function, xla):
    import tensorflow as tf

    differentiate = _differentiate_by_tape(function)
    return tf.function(differentiate, autograph=False, jit_compile=xla or None)


def _differentiate_by_tape(function):
    import tensorflow as tf

    def differentiate(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(value, tensors, unconnected_gradients=zero)
        return value, *gradients

    return differentiate


def _torch(function):
    import torch

    def differentiate(*tensors):
        tensors = [t.detach().clone().requires_grad_(True) for t in tensors]
        value = function(*tensors)
        gradients = torch.autograd.grad(value, tensors, materialize_grads=True)
        return value.detach(), *gradients

    return differentiate
