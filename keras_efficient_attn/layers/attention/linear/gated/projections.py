"""Projections of a layer's inputs to its gates, and their initialisers."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.numerics import wide_dtype

# The range of the initial step sizes.
STEPS = (1e-3, 0.1)
# Standard deviation of the initial kernels of decays and β. They then begin near what
# their biases say. A Glorot kernel, whose outputs are few heads, would multiply a
# decay's logarithm by 4 and more.
GATE_DEVIATION = 0.02


def build_projection(layer, name, input_dim, units, rank=None, deviation=None):
    """Built projections, one after the other, without biases.

    Args:
        layer: The attention layer that will own the projections.
        name: Prefix of their names.
        input_dim: Width of the inputs.
        units: Width of the outputs.
        rank: Width between two layers; `None` for one layer.
        deviation: Standard deviation of their kernels at first; `None` for the layer's
            initializer.
    """
    widths = [units] if rank is None else [rank, units]
    layers = []
    for index, width in enumerate(widths):
        suffix = "" if index + 1 == len(widths) else "_low_rank"
        # Not `Dense`, which casts float64 to float32 on PyTorch.
        dense = keras.layers.EinsumDense(
            "abc,cd->abd",
            output_shape=(None, width),
            kernel_initializer=(
                layer._new_kernel_initializer()
                if deviation is None
                else keras.initializers.RandomNormal(stddev=deviation)
            ),
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


def log_rates(least, seed):
    """Initializer: logarithms of rates that are uniform from `least` to 16."""

    def initialize(shape, dtype=None):
        rates = keras.random.uniform(shape, least, 16.0, dtype=dtype, seed=seed)
        return ops.log(rates)

    return initialize


def step_biases(seed):
    """Initializer: biases whose `softplus` is log-uniform in `STEPS`."""

    def initialize(shape, dtype=None):
        least, most = (ops.log(ops.cast(step, dtype)) for step in STEPS)
        uniform = keras.random.uniform(shape, dtype=dtype, seed=seed)
        return ops.log(ops.expm1(ops.exp(least + (most - least) * uniform)))

    return initialize
