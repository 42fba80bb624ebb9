"""Random numbers of Keras' seed generators, and dropout inside recomputed steps.

On PyTorch, Keras hides its generator from `torch.compile`, which breaks the graph. Here
one operation returns the same numbers.

A step that is recomputed for its gradient must drop the same weights again. A hash of
each weight's number, its step's number and the call's seed gives the same bits every
time, on every backend, without storing them.
"""

import keras
from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of

if BACKEND == "torch":
    from collections.abc import Sequence

    import torch

    @torch.library.custom_op("keras_efficient_attn::random_numbers", mutates_args=())
    def _numbers(
        shape: Sequence[int], seed: torch.Tensor, is_normal: bool, dtype: str
    ) -> torch.Tensor:
        """Keras' numbers for a seed, from N(0, 1) or uniform in [0, 1)."""
        generator = torch.Generator(device=seed.device)
        generator.manual_seed(int(seed.sum()) & 0xFFFFFFFF)
        options = {"dtype": getattr(torch, dtype), "device": seed.device}
        draw = torch.randn if is_normal else torch.rand
        return draw(tuple(shape), generator=generator, **options)

    @_numbers.register_fake
    def _random_shape(shape, seed, is_normal, dtype):
        return seed.new_empty(tuple(shape), dtype=getattr(torch, dtype))


def next_seed(generator):
    """Computes `generator.next()`: two new integers per call."""
    if BACKEND != "torch":
        return generator.next()
    # Keras counts with a NumPy array, which `torch.compile` cannot trace.
    seed = ops.convert_to_tensor(generator.state) * 1
    generator.state.assign(seed + ops.arange(2, dtype=seed.dtype))
    return seed


def uniform(shape, generator):
    """Computes `keras.random.uniform(shape, dtype="float32", seed=generator)`."""
    if BACKEND != "torch":
        return keras.random.uniform(shape, dtype="float32", seed=generator)
    return _numbers(shape, next_seed(generator), False, "float32")


def normal(shape, seed):
    """Computes `keras.random.normal(shape, dtype="float32", seed=seed)`."""
    if BACKEND != "torch" or not isinstance(seed, keras.random.SeedGenerator):
        return keras.random.normal(shape, dtype="float32", seed=seed)
    return _numbers(shape, next_seed(seed), True, "float32")


def drop(weights, rate, step_number, seed):
    """Weights with a share `rate` set to zero, divided by the remaining share.

    Args:
        weights: Tensor of any shape.
        rate: Share to drop, in `[0, 1)`.
        step_number: Scalar integer; different numbers give different bits.
        seed: Floats `(2,)`, below 2^24, from `dropout_seed`.
    """
    shape = shape_of(weights)
    count = 1
    for size in shape:
        count = count * size
    stream = ops.cast(step_number, "int32")
    for i in range(2):
        stream = _mix(ops.bitwise_xor(stream, ops.cast(seed[i], "int32")))
    numbers = ops.reshape(ops.arange(count, dtype="int32"), shape)
    bits = _mix(ops.bitwise_xor(_mix(numbers), stream))
    kept = ops.bitwise_and(bits, 0x7FFFFFFF) >= int(rate * 2**31)
    return ops.where(kept, weights / (1.0 - rate), 0.0)


def dropout_seed(generator, dtype):
    """The next seed of a `keras.random.SeedGenerator`, as floats `(2,)`."""
    seed = ops.bitwise_and(ops.cast(next_seed(generator), "int32"), 0xFFFFFF)
    return ops.cast(seed, dtype)


def _mix(x):
    """A permutation of the 32-bit integers; every output bit depends on all bits."""
    # Multipliers and shifts of C. Wellons' `lowbias32`; products wrap around.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, None)):
        # `>>` copies the sign; the mask makes it the shift of an unsigned integer.
        shifted = ops.bitwise_right_shift(x, shift)
        x = ops.bitwise_xor(x, ops.bitwise_and(shifted, 2 ** (32 - shift) - 1))
        x = x if factor is None else x * factor
    return x
