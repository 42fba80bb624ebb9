"""Operations in place of Keras' own, against NumPy."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.numerics import greatest_index
from keras_efficient_attn.ops.common.plan import plan_for
from tests.autodiff import to_numpy


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
