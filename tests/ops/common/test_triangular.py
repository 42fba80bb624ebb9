import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.linear_attention.gated.chunked import inverse_unit_lower
from tests.autodiff import gradients, to_numpy

SIZES = (1, 2, 7, 16, 20, 37, 64)


@pytest.mark.parametrize("size", SIZES)
def test_inverses_are_those_of_numpy(size):
    random = np.random.default_rng(0)
    matrix = np.tril(random.uniform(-1, 1, size=(2, 3, size, size)), -1) / 2
    received = inverse_unit_lower(ops.convert_to_tensor(matrix, "float32"))
    expected = np.linalg.inv(np.eye(size) + matrix)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(to_numpy(received), expected, atol=1e-5 * scale)


def test_keys_that_repeat_lose_no_digits():
    """All entries are 2: powers of the matrix reach 1e18, the inverse stays at 2."""
    matrix = np.tril(np.full((64, 64), 2.0, "float32"), -1)
    received = inverse_unit_lower(ops.convert_to_tensor(matrix[None]))
    expected = np.linalg.inv(np.eye(64) + matrix.astype("float64"))
    np.testing.assert_allclose(to_numpy(received)[0], expected, atol=1e-5)


def test_gradients_are_those_of_the_inverse():
    random = np.random.default_rng(1)
    matrix = np.tril(random.uniform(-1, 1, size=(1, 20, 20)), -1) / 2
    cotangent = random.normal(size=(1, 20, 20))

    def loss(matrix):
        inverse = inverse_unit_lower(matrix)
        return ops.sum(ops.multiply(inverse, cotangent.astype("float32")))

    (received,) = gradients(loss, matrix.astype("float32"))
    inverse = np.linalg.inv(np.eye(20) + matrix[0])
    expected = np.tril(-inverse.T @ cotangent[0] @ inverse.T, -1)
    received = np.tril(received[0], -1)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-4)
