"""Angles that grow with the position, accurate at any position."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.constants import constant


def position_angles(positions, frequencies, *arguments, dtype):
    """`positions[..., None] * frequencies`, up to whole turns.

    A product in float32 is off by 0.006 at position 100,000, and by 1 at 16 million.
    Here the turns per position are `n / 2³² + rest`, `n` an integer: an int32 counts
    `positions * n` up to whole turns, exactly, and the rest is too small to be lost.

    Args:
        positions: Integers.
        frequencies: Function of `arguments` that returns an array `(waves,)`.
        *arguments: Hashable arguments of `frequencies`.
        dtype: `"float32"` or `"float64"`.

    Returns:
        `(*positions.shape, waves)`, between −2π and 2π.
    """
    parts = [
        constant(part, frequencies, *arguments, dtype=kind)
        for part, kind in ((_count, "int32"), (_rest_angle, dtype))
    ]
    positions = ops.cast(positions, "int32")[..., None]
    counted = ops.cast(positions * parts[0], dtype) * (2 * np.pi * 2.0**-32)
    return counted + ops.cast(positions, dtype) * parts[1]


def _count(frequencies, *arguments):
    turns = frequencies(*arguments) / (2 * np.pi)
    # Whole turns per position have no effect.
    return np.round((turns - np.round(turns)) * 2**32).astype("int64")


def _rest_angle(frequencies, *arguments):
    turns = frequencies(*arguments) / (2 * np.pi)
    rest = turns - np.round(turns) - _count(frequencies, *arguments) / 2**32
    return 2 * np.pi * rest
