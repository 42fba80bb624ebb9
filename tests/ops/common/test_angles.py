"""Angles of far positions, against float64."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.plan import BLOCK_SIZES, plan_for
from keras_efficient_attn.ops.common.positions import (
    position_angles,
    rotary_embedding,
    wave_frequencies,
)
from tests.autodiff import to_numpy

KINDS = BLOCK_SIZES if keras.backend.backend() == "jax" else ["cpu"]
FAR = np.array([0, 1, -3, 257, 99_999, 2**20 + 1, -(2**27) + 5, 2**31 - 1], "int32")


def fast_frequencies():
    """More than half a turn per position, and more than one."""
    return np.array([3.5, 4.0, 6.0, 7.0])


@pytest.mark.parametrize(
    "frequencies", [(wave_frequencies, 4, 10_000.0), (fast_frequencies,)]
)
def test_angles_are_exact_at_any_position(frequencies):
    function, *arguments = frequencies
    angles = to_numpy(position_angles(FAR, function, *arguments, dtype="float32"))
    expected = FAR.astype("float64")[:, None] * function(*arguments)
    for wave in (np.sin, np.cos):
        np.testing.assert_allclose(wave(angles), wave(expected), rtol=0, atol=2e-6)


def test_rotations_of_far_positions_differ_by_the_distance_alone():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 1, 8)).astype("float32")

    def product(position):
        rotated = (
            rotary_embedding(ops.convert_to_tensor(x), np.array([[p]], "int32"))
            for x, p in ((query, position + 5), (key, position))
        )
        one, other = map(to_numpy, rotated)
        return np.sum(one * other)

    near = product(0)
    assert product(10) == pytest.approx(near, abs=1e-5)
    assert product(10_000_000) == pytest.approx(near, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_of_channels_turn_on_each_device(kind, dtype):
    rng = np.random.default_rng(0)
    x = ops.cast(rng.normal(size=(2, 5, 3, 8)), dtype)
    first, second = np.split(to_numpy(ops.cast(x, "float32")), 2, axis=-1)
    positions = np.array([[0, 1, 7, 300, 70_001]], "int32")
    turns = positions[..., None, None] * wave_frequencies(4, 10_000.0)
    expected = (first + 1j * second) * np.exp(1j * turns)
    expected = np.concatenate([expected.real, expected.imag], axis=-1)
    with plan_for(kind):
        rotated = rotary_embedding(x, ops.convert_to_tensor(positions))
        wide = rotary_embedding(x, ops.convert_to_tensor(positions), dtype="float32")
    assert keras.backend.standardize_dtype(rotated.dtype) == dtype
    # A bfloat16 number has 8 bits.
    error = 2.0**-8 if dtype == "bfloat16" else 1e-5
    received = to_numpy(ops.cast(rotated, "float32"))
    np.testing.assert_allclose(received, expected, rtol=error, atol=1e-5)
    np.testing.assert_allclose(to_numpy(wide), expected, rtol=1e-4, atol=1e-5)
