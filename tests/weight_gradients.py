"""Gradients of a loss by weights that it reads."""

import keras
import numpy as np

from tests.autodiff import gradient_function, to_numpy


def loss_of_weights(loss, variables):
    """`(function, values)`: `loss` with values of the variables as last arguments."""
    values = [to_numpy(variable) for variable in variables]

    def function(*tensors):
        inputs = tensors[: len(tensors) - len(values)]
        weights = tensors[len(inputs) :]
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            return loss(*inputs)

    return function, values


def weight_gradient_function(loss, layer, with_value=False):
    """As `gradient_function`; then the gradients of the layer's trainable weights."""
    function, values = loss_of_weights(loss, layer.trainable_variables)
    differentiate = gradient_function(function, with_value=with_value)
    return lambda *arrays: differentiate(*arrays, *values)


def assert_gradients_close(received, expected):
    """Up to rounding of the largest entries."""
    for ours, theirs in zip(received, expected, strict=True):
        scale = max(1, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale)
