"""Layers that another layer holds, and weights."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.numerics import matrix_product


class Dense(keras.layers.Dense):
    """Keras' layer, which on PyTorch computes in float32 for float64."""

    def call(self, inputs, training=None):
        if self.compute_dtype != "float64":
            return super().call(inputs, training=training)
        outputs = matrix_product(inputs, self.kernel)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs if self.activation is None else self.activation(outputs)


def build_layer(layer, shape, dtype):
    """Builds a layer with one input, and its sublayers.

    If a layer does not define `build`, Keras builds its sublayers by tracing a call.
    The inherited `build` would only mark it as built; the first call would then create
    the variables inside a gradient, which would miss them.
    """
    if layer.built:
        return
    if type(layer).build is keras.Layer.build:
        layer(keras.KerasTensor(shape, dtype=dtype))
    else:
        layer.build(shape)


def add_counter(layer, name):
    """A weight of a layer that counts its calls, from 0 on."""
    return layer.add_weight(
        name=name,
        shape=(),
        dtype="int32",
        initializer="zeros",
        trainable=False,
        autocast=False,
        aggregation="only_first_replica",
    )


def identity(shape, dtype=None):
    """Initializer of `(..., dim, dim)`: identity matrices."""
    return ops.zeros(shape, dtype) + ops.eye(shape[-1], dtype=dtype)
