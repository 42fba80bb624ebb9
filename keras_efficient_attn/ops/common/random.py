"""Random numbers of Keras' seed generators, in programs that are compiled as well.

On PyTorch, Keras hides its generator from `torch.compile`, which would break the
program there. Here the same numbers are the result of one operation.
"""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name


def next_seed(generator):
    """As `generator.next()`: two integers, other ones each time."""
    if backend_name() != "torch":
        return generator.next()
    # Keras counts by an array of NumPy, which `torch.compile` cannot trace.
    seed = ops.convert_to_tensor(generator.state) * 1
    generator.state.assign(seed + ops.arange(2, dtype=seed.dtype))
    return seed


def uniform(shape, generator):
    """As `keras.random.uniform(shape, seed=generator)`."""
    if backend_name() != "torch":
        return keras.random.uniform(shape, seed=generator)
    from keras_efficient_attn.ops.common import random_torch

    return random_torch.numbers(
        shape, next_seed(generator), False, keras.config.floatx()
    )


def normal(shape, seed):
    """As `keras.random.normal(shape, dtype="float32", seed=seed)`."""
    if backend_name() != "torch" or not isinstance(seed, keras.random.SeedGenerator):
        return keras.random.normal(shape, dtype="float32", seed=seed)
    from keras_efficient_attn.ops.common import random_torch

    return random_torch.numbers(shape, next_seed(seed), True, "float32")
