"""Relative and rotary positions: waves, distances, and angles that stay accurate."""

import functools

import numpy as np
from keras import ops
from keras.backend import standardize_dtype

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.constants import constant
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    cosine,
    pad,
    sine,
)
from keras_efficient_attn.ops.common.plan import device_kind


def window_distances(window, causal):
    """Distances `query position - key position` in a window, in decreasing order."""
    return np.arange(window - 1, -1 if causal else -window, -1)


def wave_frequencies(number, max_wavelength):
    """Frequencies that decrease from 1 on a logarithmic scale, as an array."""
    return max_wavelength ** (-np.arange(number) / number)


def window_sinusoids(window, causal, dim, max_wavelength, dtype):
    """Sines, then cosines, of the distances in a window.

    Args:
        window, causal: As `window_distances`.
        dim: Even number of channels.
        max_wavelength: Longest wavelength, over 2π.
        dtype: Dtype of the tensor `(distances, dim)`, which is rounded only once.
    """
    if BACKEND == "torch":
        # Other backends may lack float64; `torch.compile` lacks NumPy.
        last = -1 if causal else -window
        distances = ops.arange(window - 1, last, -1, dtype="int32")
        waves = distance_sinusoids(distances, dim, max_wavelength, "float64")
        return ops.cast(waves, dtype)
    frequencies = wave_frequencies(dim // 2, max_wavelength)
    angles = window_distances(window, causal)[:, None] * frequencies
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return ops.convert_to_tensor(waves, dtype)


def shifted_to_keys(scores, width):
    """Converts scores by distance to scores by key.

    Args:
        scores: `(..., queries, distances)`; entry `m` of query `i` belongs to key
            `i + m`.
        width: Number of keys, at least `queries + distances - 1`.

    Returns:
        `(..., queries, width)`, zero for keys without a distance.
    """
    *batch, queries, distances = shape_of(scores)
    # Rows longer than `width` by one shift by one per row.
    padding = [(0, 0)] * (len(batch) + 1) + [(0, width + 1 - distances)]
    scores = ops.reshape(pad(scores, padding), (*batch, queries * (width + 1)))
    return ops.reshape(scores[..., : queries * width], (*batch, queries, width))


def bias_products(query, bias):
    """A bias of the logits by distance, as products of queries and keys.

    Args:
        query: `(batch, length, heads, dim)`.
        bias: `(distances, heads)`, or `None`.

    Returns:
        `(position_query, position_key)`, of one channel, for `attend_near`; `None` for
        no bias.
    """
    return None if bias is None else (ops.ones_like(query[..., :1]), bias[..., None])


def distance_sinusoids(distances, dim, max_wavelength, dtype):
    """Computes `window_sinusoids` for an integer tensor `(distances,)`.

    `dtype` is float32 or float64.
    """
    angles = position_angles(
        distances, wave_frequencies, dim // 2, max_wavelength, dtype=dtype
    )
    waves = ops.concatenate([sine(angles), cosine(angles)], axis=-1)
    return ops.cast(waves, dtype)


def shifted_by_query(scores, width):
    """Converts scores by distance to scores by key, for queries with shared keys.

    Args:
        scores: `(..., queries, distances)`, of distances that decrease by one; entry
            `m` of query `i` belongs to key `i + m - (queries - 1)`. There are at least
            `queries + width - 1` distances, so that each key of each query has one.
        width: Number of keys.

    Returns:
        `(..., queries, width)`.
    """
    *batch, queries, distances = shape_of(scores)
    # Each row starts one entry earlier than the row above.
    padding = [(0, 0)] * (len(batch) + 1) + [(1, 0)]
    scores = ops.reshape(pad(scores, padding), (*batch, distances + 1, queries))
    scores = ops.reshape(scores[..., 1:, :], (*batch, queries, distances))
    return scores[..., :width]


def rotary_embedding(x, positions, max_wavelength=10_000.0, dtype=None):
    """Rotates pairs of channels by angles that grow with the position.

    The dot product of two rotated vectors depends on their positions only through
    the difference. Channel `i` is paired with channel `i + head_dim / 2`.

    Args:
        x: `(batch, length, heads, head_dim)`, `head_dim` even.
        positions: `(batch, length)` or `(1, length)`, integers.
        max_wavelength: Wavelength of the slowest pair, in positions over 2π.
        dtype: Of the result. Defaults to `None`: that of `x`.

    Returns:
        The rotated tensor, in the shape of `x`.

    Reference:
        - [Su et al., 2021](https://arxiv.org/abs/2104.09864)
    """
    # Half precision cannot tell far positions apart.
    half, wide_dtype = x.shape[-1] // 2, accumulator_dtype(x)
    angles = position_angles(
        positions[..., None], wave_frequencies, half, max_wavelength, dtype=wide_dtype
    )
    cos, sin, wide = cosine(angles), sine(angles), ops.cast(x, wide_dtype)
    if BACKEND == "jax" and _turns_by_product(x):
        cos, sin = (ops.concatenate([wave, wave], axis=-1) for wave in (cos, sin))
        turning = wide if device_kind() == "cpu" else x
        turned = turning @ ops.convert_to_tensor(_quarter_turn(half), turning.dtype)
        rotated = wide * cos + ops.cast(turned, wide_dtype) * sin
    else:
        first, second = wide[..., :half], wide[..., half:]
        rotated = ops.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        )
    return ops.cast(rotated, dtype or x.dtype)


def _turns_by_product(x):
    """Whether XLA rotates faster by a product with a matrix of 1, −1 and 0.

    It joins halves, and slices their gradients, entry by entry on CPUs, and pads them
    to whole lanes on TPUs, whose products of bfloat16 are exact here.
    """
    kind = device_kind()
    half_precision = standardize_dtype(x.dtype) == "bfloat16"
    return kind == "cpu" or (kind == "tpu" and half_precision)


@functools.cache
def _quarter_turn(half):
    """The matrix that maps `[first, second]` to `[−second, first]`."""
    turn = np.eye(2 * half, k=half, dtype="int8")
    return turn - turn.T


def rotate_from(x, start, max_wavelength, dtype=None):
    """`rotary_embedding` of consecutive positions.

    Args:
        x: `(batch, length, heads, head_dim)`.
        start: Position of the first, integers `(batch,)`, or of each, `(batch,
            length)`; `None` for 0.
        max_wavelength, dtype: As for `rotary_embedding`.
    """
    positions = ops.arange(shape_of(x)[1], dtype="int32")[None]
    if start is not None:
        each = len(start.shape) == 2
        positions = start if each else positions + start[:, None]
    return rotary_embedding(x, positions, max_wavelength, dtype)


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
