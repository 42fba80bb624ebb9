"""Bits from a counter: independent and reproducible."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.random import drop
from tests.autodiff import to_numpy


def kept_share(step=0.0, seed=(1.0, 2.0), rate=0.3, shape=(4, 50, 100)):
    dropped = drop(
        ops.ones(shape),
        rate,
        ops.convert_to_tensor(step),
        ops.convert_to_tensor(np.array(seed, "float32")),
    )
    return to_numpy(dropped) != 0


def mix(x):
    """The mixing function in Python integers, truncated to 32 bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x


def test_bits_are_those_of_the_hash():
    stream = mix(mix(5 ^ 7) ^ 11)
    bits = [mix(mix(number) ^ stream) % 2**31 for number in range(60)]
    expected = (np.array(bits) >= 0.3 * 2**31).reshape(3, 20)
    np.testing.assert_array_equal(kept_share(5.0, (7.0, 11.0), 0.3, (3, 20)), expected)


def test_the_rate_is_that_asked_for_everywhere():
    sample = kept_share()
    deviation = np.sqrt(0.3 * 0.7)
    assert abs(sample.mean() - 0.7) < 4 * deviation / np.sqrt(sample.size)
    for axis in range(3):
        means = sample.mean(axis=tuple(a for a in range(3) if a != axis))
        limit = 5 * deviation / np.sqrt(sample.size / len(means))
        assert np.abs(means - 0.7).max() < limit


def test_steps_and_seeds_are_independent():
    first = kept_share()
    np.testing.assert_array_equal(first, kept_share())
    agreement = 0.3**2 + 0.7**2
    limit = 4 * np.sqrt(agreement * (1 - agreement) / first.size)
    for other in (
        kept_share(1.0),
        kept_share(seed=(2.0, 1.0)),
        kept_share(seed=(1.0, 3.0)),
    ):
        assert abs((first == other).mean() - agreement) < limit
    # Neighbours as well, in every direction.
    for axis in range(3):
        shifted = np.roll(first, 1, axis)
        assert abs((first == shifted).mean() - agreement) < limit
