"""Depthwise convolutions against their definition in float64, gradients too."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.convolution import (
    causal_convolution,
    depthwise,
)
from keras_efficient_attn.ops.common.documents import Documents
from tests.autodiff import gradients, to_numpy
from tests.ops.pieces import read_in_pieces

IDS = np.array([[5, 5, 5, 2, 2, 7, 7, 7, 7, 1], [3, 3, 3, 3, 3, 3, 3, 4, 4, 4]])


def expected(x, kernel, before, after, ids=None):
    """`y[t] = Σ_i kernel[i] x[t + i - before]`, and its matrix: `y = matrix · x`."""
    size, given = len(kernel), x.shape[1]
    length = max(0, given + before + after - size + 1)
    y = np.zeros((len(x), length, *x.shape[2:]))
    for row in range(len(x)):
        for t in range(length):
            for i in range(size):
                s = t + i - before
                if 0 <= s < given and (ids is None or ids[row, s] == ids[row, t]):
                    y[row, t] += kernel[i] * x[row, s]
    return y


def derivatives(x, kernel, grad, *options):
    """The gradients of `Σ grad y`, which is linear in `x` and in `kernel`."""
    grad_x, grad_kernel = np.zeros(x.shape), np.zeros(kernel.shape)
    for s in range(x.shape[1]):
        one = np.zeros(x.shape)
        one[:, s] = 1
        grad_x[:, s] = (expected(one, kernel, *options) * grad).sum(1)
    for i in range(len(kernel)):
        one = np.zeros(kernel.shape)
        one[i] = 1
        grad_kernel[i] = (expected(x, one, *options) * grad).sum((0, 1))
    return grad_x, grad_kernel


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 10])
def test_values_and_gradients(length, before, documents):
    random = np.random.default_rng(0)
    x = random.normal(size=(2, length, 2, 3))
    kernel = random.normal(size=(4, 2, 3))
    grad = random.normal(size=x.shape)
    ids = IDS[:, :length] if documents else None

    def convolve(x, kernel):
        of = None
        if documents:
            of = Documents.of(ops.convert_to_tensor(ids, "int32"))
        return depthwise(x, kernel, before, 3 - before, of)

    def loss(x, kernel):
        return ops.sum(convolve(x, kernel) * ops.cast(grad, x.dtype))

    arrays = x.astype("float32"), kernel.astype("float32")
    received = to_numpy(convolve(*map(ops.convert_to_tensor, arrays)))
    options = before, 3 - before, ids
    np.testing.assert_allclose(received, expected(x, kernel, *options), atol=1e-5)
    wanted = derivatives(x, kernel, grad, *options)
    for ours, theirs in zip(gradients(loss, *arrays), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "error"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.05)]
)
def test_dtypes(dtype, error):
    random = np.random.default_rng(1)
    x = random.integers(-4, 5, size=(2, 9, 3)).astype("float64")
    kernel = random.integers(-4, 5, size=(4, 3)) / 8
    tensors = (ops.cast(ops.convert_to_tensor(t), dtype) for t in (x, kernel))
    output = causal_convolution(*tensors)[0]
    assert output.dtype == ops.cast(0.0, dtype).dtype
    output = to_numpy(ops.cast(output, "float64"))
    np.testing.assert_allclose(output, expected(x, kernel, 3, 0), rtol=error, atol=1e-9)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3)])
def test_nothing_gives_nothing(shape):
    x, kernel = np.zeros(shape, "float32"), np.ones((4, 3), "float32")
    output = causal_convolution(*map(ops.convert_to_tensor, (x, kernel)))[0]
    assert tuple(output.shape) == shape


def test_a_segment_continues_the_one_before():
    random = np.random.default_rng(2)
    x, kernel = random.normal(size=(2, 11, 3)), random.normal(size=(4, 3))

    def convolve(x, past):
        tensors = (ops.convert_to_tensor(tensor, "float32") for tensor in (x, kernel))
        return causal_convolution(*tensors, past)

    past = np.zeros((2, 3, 3), "float32")
    output, _ = read_in_pieces(convolve, past, [x], (1, 2, 8))
    np.testing.assert_allclose(output, expected(x, kernel, 3, 0), atol=1e-5)
