"""Building of a layer that another one holds, and of weights."""

import keras
from keras import ops


def build_layer(layer, shape, dtype):
    """Builds a layer of one input, with what is inside it.

    A layer without a `build` of its own has Keras build its sublayers, by tracing a
    call. Its inherited `build` would only say that it is built, and the first call
    create the variables: inside a gradient, too late to be in it.
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
