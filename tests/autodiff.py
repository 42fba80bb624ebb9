"""Gradients of a function of arrays, on whichever backend Keras runs."""

import keras
import numpy as np
from keras import ops


def to_numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def gradient_function(function):
    """A compiled callable: arrays to the gradients of the scalar `function`.

    Keep it for several calls: JAX and TensorFlow compile once per callable.
    """
    compiled = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
    graded = compiled[keras.backend.backend()](function)

    def call(*arrays):
        tensors = tuple(ops.convert_to_tensor(array) for array in arrays)
        return [to_numpy(gradient) for gradient in graded(*tensors)]

    return call


def gradients(function, *arrays):
    return gradient_function(function)(*arrays)


def _jax(function):
    import jax

    compiled = jax.jit(
        lambda *tensors: jax.grad(function, argnums=tuple(range(len(tensors))))(
            *tensors
        )
    )
    return compiled


def _tensorflow(function):
    import tensorflow as tf

    @tf.function
    def graded(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(value, tensors, unconnected_gradients=zero)

    return graded


def _torch(function):
    import torch

    def graded(*tensors):
        tensors = [t.detach().clone().requires_grad_(True) for t in tensors]
        return torch.autograd.grad(function(*tensors), tensors, materialize_grads=True)

    return graded
