"""Feature maps of arrays, against their formulas."""

import math

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import feature_maps, fourier
from keras_efficient_attn.ops.common.random_features import (
    gaussian_blocks,
    random_projection,
)
from tests.autodiff import to_numpy

DIM, ROWS = 4, 3
X, OTHER = np.random.default_rng(0).normal(size=(2, 1, 2, 1, 6, DIM)).astype("float32")
PROJECTION = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype("float32")
KERNEL = np.random.default_rng(2).normal(size=(2, DIM, ROWS)).astype("float32")
BIAS, NORM = np.ones((2, ROWS), "float32"), np.full((2, DIM), 0.3, "float32")
NORMS = np.square(X).sum(-1, keepdims=True)


def mapped(name, x, *weights):
    """The true features, of arrays."""
    features, log_scale = getattr(feature_maps, name)(x, *weights)
    features = to_numpy(features)
    if log_scale is None:
        return features
    return features * np.exp(to_numpy(log_scale))[..., None]


def softmax(x):
    weights = np.exp(x)
    return weights / weights.sum(-1, keepdims=True)


PROJECTED, BY_HEAD = X @ PROJECTION.T, np.einsum("bhcsd,hdm->bhcsm", X, KERNEL)
FORMULAS = {
    "positive_random_features": (
        (PROJECTION,),
        np.exp(PROJECTED - NORMS / 2) / math.sqrt(ROWS),
    ),
    "optimal_positive_features": (
        (PROJECTION, np.full(DIM, -0.1, "float32")),
        1.4 ** (DIM / 4)
        * np.exp(
            -0.1 * np.square(PROJECTION).sum(-1)
            + math.sqrt(1.4) * PROJECTED
            - NORMS / 2
        )
        / math.sqrt(ROWS),
    ),
    "trigonometric_features": (
        (PROJECTION,),
        np.concatenate([np.cos(PROJECTED), np.sin(PROJECTED)], -1)
        * np.exp(NORMS / 2)
        / math.sqrt(ROWS),
    ),
    "relu_features": ((), np.maximum(X, 0) + 1e-3),
    "elu_features": ((), np.where(X > 0, X + 1, np.exp(X))),
    "unit_features": ((), X / np.sqrt(NORMS + 1e-3 * DIM)),
    "sum_features": ((), X / np.abs(X).sum(-1, keepdims=True)),
    "softmax_query_features": ((), softmax(X)),
    "exponential_features": ((), np.exp(X)),
    "hedgehog_features": (
        (KERNEL,),
        softmax(np.concatenate([BY_HEAD, -BY_HEAD], axis=-1)),
    ),
    "learned_exponential_features": (
        (KERNEL, BIAS, NORM),
        np.exp(BY_HEAD + 1 - 0.3 * NORMS) / math.sqrt(ROWS),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_maps_take_arrays(name):
    weights, expected = FORMULAS[name]
    received = mapped(name, X, *weights)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-6)


def test_polynomials_and_squares_take_arrays():
    products = (X * OTHER).sum(-1)
    for name, expected in (
        ("taylor_features", 1 + products + products**2 / 2),
        ("power_features", (1 + products / 2) ** 2),
    ):
        received = (mapped(name, X) * mapped(name, OTHER)).sum(-1)
        np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)
    first, second = (
        to_numpy(fourier.squared_features(x, PROJECTION)[0]) for x in (X, OTHER)
    )
    expected = np.cos((X - OTHER) @ PROJECTION.T).mean(-1) ** 2
    np.testing.assert_allclose((first * second).sum(-1), expected, rtol=1e-4, atol=1e-5)


def test_the_best_shape_ignores_what_masks_hide():
    random = np.random.default_rng(3)
    query, key = random.normal(size=(2, 2, 5, 3, DIM)).astype("float32")
    masks = (
        np.array([[1, 0, 2, 3, 0], [1, 1, 1, 0, -1]]),
        np.array([[0, 1, 4, 1, 1]] * 2),
    )
    expected = np.zeros((2, 3))
    for row, head in np.ndindex(2, 3):
        q, k = (
            x[row, mask[row] != 0, head].astype("float64")
            for x, mask in zip((query, key), masks, strict=True)
        )
        n = np.square(q[:, None] + k).sum(-1).mean()
        rho = (math.sqrt((2 * n + DIM) ** 2 + 8 * DIM * n) - 2 * n - DIM) / (4 * n)
        expected[row, head] = (1 - 1 / rho) / 8
    for x, mask in zip((query, key), masks, strict=True):
        x[mask == 0] = np.nan
    received = feature_maps.optimal_shape(query, key, *masks)
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-4)


@pytest.mark.parametrize("dim", [4, 16])
@pytest.mark.parametrize(
    ("kind", "floor"), [("float32", 1e-15), ("float64", 1e-140), ("float16", 1e-4)]
)
def test_no_feature_of_elu_is_zero(dim, kind, floor, backend):
    if backend == "jax" and kind == "float64":
        pytest.skip("JAX has float32 by default")
    x = np.full((1, dim), -600.0, kind)
    x[0, 0] = 0
    features, _ = feature_maps.elu_features(ops.convert_to_tensor(x))
    received = to_numpy(features)[0]
    assert received[0] == 1
    np.testing.assert_allclose(received[1:], floor, rtol=1e-2)


@pytest.mark.any_backend
def test_another_norm_of_rows_is_refused():
    with pytest.raises(ValueError, match="row_norm='foo'"):
        random_projection(*gaussian_blocks(3, 4, 0), row_norm="foo")
