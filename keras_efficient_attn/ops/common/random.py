"""Random numbers of Keras' seed generators, also in compiled programs.

On PyTorch, Keras hides its generator from `torch.compile`, which breaks the graph. Here
one operation returns the same numbers.
"""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND


def next_seed(generator):
    """Computes `generator.next()`: two new integers per call."""
    if BACKEND != "torch":
        return generator.next()
    # Keras counts with a NumPy array, which `torch.compile` cannot trace.
    seed = ops.convert_to_tensor(generator.state) * 1
    generator.state.assign(seed + ops.arange(2, dtype=seed.dtype))
    return seed


def uniform(shape, generator):
    """Computes `keras.random.uniform(shape, seed=generator)`."""
    if BACKEND != "torch":
        return keras.random.uniform(shape, seed=generator)
    from keras_efficient_attn.ops.common import random_torch

    return random_torch.numbers(
        shape, next_seed(generator), False, keras.config.floatx()
    )


def normal(shape, seed):
    """Computes `keras.random.normal(shape, dtype="float32", seed=seed)`."""
    if BACKEND != "torch" or not isinstance(seed, keras.random.SeedGenerator):
        return keras.random.normal(shape, dtype="float32", seed=seed)
    from keras_efficient_attn.ops.common import random_torch

    return random_torch.numbers(shape, next_seed(seed), True, "float32")
