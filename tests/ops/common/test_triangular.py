import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.triangular import solve_unit_lower
from tests.autodiff import gradients, to_numpy

SIZES = (1, 2, 7, 16, 20, 37, 64)


@pytest.mark.parametrize("size", SIZES)
def test_solutions_are_those_of_numpy(size):
    random = np.random.default_rng(0)
    matrix = np.tril(random.uniform(-1, 1, size=(2, 3, size, size)), -1) / 2
    right = random.normal(size=(2, 3, size, 4))
    tensors = (ops.convert_to_tensor(x, "float32") for x in (matrix, right))
    received = solve_unit_lower(*tensors)
    expected = np.linalg.solve(np.eye(size) + matrix, right)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(to_numpy(received), expected, atol=1e-5 * scale)


def test_keys_that_repeat_lose_no_digits():
    """All entries are 2: powers of the matrix would be of 1e18, its inverse is of 2."""
    matrix = np.tril(np.full((64, 64), 2.0, "float32"), -1)
    tensors = (
        ops.convert_to_tensor(x[None]) for x in (matrix, np.eye(64, dtype="float32"))
    )
    received = solve_unit_lower(*tensors)
    expected = np.linalg.inv(np.eye(64) + matrix.astype("float64"))
    np.testing.assert_allclose(to_numpy(received)[0], expected, atol=1e-5)


def test_gradients_are_those_of_the_inverse():
    random = np.random.default_rng(1)
    matrix = np.tril(random.uniform(-1, 1, size=(1, 20, 20)), -1) / 2
    right, cotangent = random.normal(size=(2, 1, 20, 3))

    def loss(matrix, right):
        solved = solve_unit_lower(matrix, right)
        return ops.sum(ops.multiply(solved, cotangent.astype("float32")))

    arrays = matrix.astype("float32"), right.astype("float32")
    grad_matrix, grad_right = gradients(loss, *arrays)
    inverse = np.linalg.inv(np.eye(20) + matrix[0])
    expected = inverse.T @ cotangent[0]
    np.testing.assert_allclose(grad_right[0], expected, rtol=1e-4, atol=1e-4)
    expected = np.tril(-expected @ (inverse @ right[0]).T, -1)
    received = np.tril(grad_matrix[0], -1)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-4)
