"""Dropout inside recomputed steps: random bits from a counter, not from a generator.

A step that is recomputed for its gradient must drop the same weights again. A hash of
each weight's number, its step's number and the call's seed gives the same bits every
time, on every backend, without storing them.
"""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.random import next_seed


def drop(weights, rate, step_number, seed):
    """Weights with a share `rate` set to zero, divided by the remaining share.

    Args:
        weights: Tensor of any shape.
        rate: Share to drop, in `[0, 1)`.
        step_number: Scalar float, below 2^24; different numbers give different bits.
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
