"""Operations in place of Keras' own, against NumPy."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.numerics import greatest_index, norm_of_heads
from keras_efficient_attn.ops.common.plan import plan_for
from tests.autodiff import gradients, to_numpy


@pytest.mark.parametrize("kind", ["cpu", "tpu"])
@pytest.mark.parametrize("size", [1, 7, 64, 80, 100, 512])
def test_the_first_of_the_greatest_entries(size, kind):
    # Few different numbers: most rows have several greatest entries.
    x = np.random.default_rng(0).integers(-4, 4, size=(3, 50, size)).astype("float32")
    x[0] *= -0.0
    x[1, :, -1] = 9.0
    with plan_for(kind):
        received = to_numpy(greatest_index(ops.convert_to_tensor(x)))
    np.testing.assert_array_equal(received, x.argmax(-1))


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_the_norm_of_heads_is_the_formula(mean):
    """Also with a large mean, where a variance from sums of squares loses digits."""
    random = np.random.default_rng(0)
    x, weight, direction = random.normal(size=(3, 2, 5, 2, 64))
    gain = random.normal(size=(2, 64))
    x = (x + mean).astype("float32").astype("float64")

    def formula(x):
        centered = x - x.mean(-1, keepdims=True)
        variance = np.square(centered).mean(-1, keepdims=True)
        return gain * centered / np.sqrt(variance + 1e-5)

    def norm(x):
        factors = ops.convert_to_tensor(gain, "float32")
        return norm_of_heads(x, factors, 1e-5, True, "float32")

    def loss(x):
        return ops.sum(ops.multiply(norm(x), weight.astype("float32")))

    single = x.astype("float32")
    received = to_numpy(norm(ops.convert_to_tensor(single)))
    np.testing.assert_allclose(received, formula(x), rtol=1e-3, atol=1e-4)
    (gradient,) = gradients(loss, single)
    step = 1e-4 * direction
    slope = ((formula(x + step) - formula(x - step)) * weight).sum() / 2e-4
    np.testing.assert_allclose((to_numpy(gradient) * direction).sum(), slope, rtol=1e-3)
