"""Rotary position embedding."""

from keras import ops

from keras_efficient_attn.ops.common.angles import position_angles
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, cosine, sine
from keras_efficient_attn.ops.common.relative_positions import wave_frequencies


def rotary_embedding(x, positions, max_wavelength=10_000.0):
    """Rotates pairs of channels by angles that grow with the position.

    The dot product of two rotated vectors depends on their positions only through
    the difference. Channel `i` is paired with channel `i + head_dim / 2`.

    Args:
        x: `(batch, length, heads, head_dim)`, `head_dim` even.
        positions: `(batch, length)` or `(1, length)`, integers.
        max_wavelength: Wavelength of the slowest pair, in positions over 2π.

    Returns:
        The rotated tensor, in the shape and dtype of `x`.

    Reference:
        - [Su et al., 2021](https://arxiv.org/abs/2104.09864)
    """
    half = x.shape[-1] // 2
    angles = position_angles(
        positions[..., None],
        wave_frequencies,
        half,
        max_wavelength,
        dtype=accumulator_dtype(x),
    )
    cos, sin = (ops.cast(wave(angles), x.dtype) for wave in (cosine, sine))
    first, second = x[..., :half], x[..., half:]
    return ops.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def rotate_from(x, start, max_wavelength):
    """`rotary_embedding` of consecutive positions.

    Args:
        x: `(batch, length, heads, head_dim)`.
        start: Position of the first, integers `(batch,)`; `None` for 0.
        max_wavelength: As for `rotary_embedding`.
    """
    positions = ops.arange(shape_of(x)[1], dtype="int32")[None]
    if start is not None:
        positions = positions + start[:, None]
    return rotary_embedding(x, positions, max_wavelength)
