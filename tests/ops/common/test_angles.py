"""Angles of far positions, against float64."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.positions import (
    position_angles,
    rotary_embedding,
    wave_frequencies,
)
from tests.autodiff import to_numpy

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
