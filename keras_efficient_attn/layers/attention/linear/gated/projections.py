"""Projections of a layer's inputs to its gates, and their initialisers."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.numerics import wide_dtype

# The ranges of the initial decay rates and of the initial step sizes.
RATES, STEPS = (1.0, 16.0), (1e-3, 0.1)


def build_projection(layer, name, input_dim, units, rank=None):
    """Built projections, one after the other, without biases.

    Args:
        layer: The attention layer that will own the projections.
        name: Prefix of their names.
        input_dim: Width of the inputs.
        units: Width of the outputs.
        rank: Width between two layers; `None` for one layer.
    """
    widths = [units] if rank is None else [rank, units]
    layers = []
    for index, width in enumerate(widths):
        suffix = "" if index + 1 == len(widths) else "_low_rank"
        # Not `Dense`, which casts float64 to float32 on PyTorch.
        dense = keras.layers.EinsumDense(
            "abc,cd->abd",
            output_shape=(None, width),
            kernel_initializer=layer._new_kernel_initializer(),
            kernel_regularizer=layer._kernel_regularizer,
            kernel_constraint=layer._kernel_constraint,
            dtype=layer.dtype_policy,
            name=name + suffix,
        )
        dense.build((None, None, input_dim))
        input_dim = width
        layers.append(dense)
    return layers


def apply_projections(layers, x):
    """`x` through all layers."""
    for layer in layers:
        x = layer(x)
    return x


def wide(x):
    """`x` in float32 or float64: gates need at least float32."""
    return ops.cast(x, wide_dtype(keras.backend.standardize_dtype(x.dtype)))


def log_rates(seed):
    """Initializer: logarithms of rates drawn uniformly from `RATES`."""

    def initialize(shape, dtype=None):
        return ops.log(keras.random.uniform(shape, *RATES, dtype=dtype, seed=seed))

    return initialize


def step_biases(seed):
    """Initializer: biases whose `softplus` is log-uniform in `STEPS`."""

    def initialize(shape, dtype=None):
        least, most = (ops.log(ops.cast(step, dtype)) for step in STEPS)
        uniform = keras.random.uniform(shape, dtype=dtype, seed=seed)
        return ops.log(ops.expm1(ops.exp(least + (most - least) * uniform)))

    return initialize
