"""The exponentials of feature maps, and their derivatives, against their formulae."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.linear_attention import feature_maps
from keras_efficient_attn.ops.linear_attention.feature_maps import FEATURE_FLOOR
from tests.autodiff import float64, gradient_function

X = np.array([[-800.0, -40.0, -1.0, -1e-9, 0.0, 1e-9, 2.0, 700.0]])
WEIGHTS = np.random.default_rng(0).normal(size=X.shape)


def value_and_gradient(features):
    """Weighted features, and their derivatives, in float64."""

    def weighted(x):
        return ops.sum(ops.convert_to_tensor(WEIGHTS, x.dtype) * features(x))

    with float64():
        return gradient_function(weighted, with_value=True)(X)


def test_elu_plus_one():
    value, gradient = value_and_gradient(lambda x: feature_maps.elu_features(x)[0])
    below = np.exp(np.minimum(X, 0.0))
    np.testing.assert_allclose(value, (WEIGHTS * (np.maximum(X, 0.0) + below)).sum())
    np.testing.assert_allclose(gradient, WEIGHTS * below)


def test_exponentials_of_at_most_one():
    value, gradient = value_and_gradient(
        lambda x: feature_maps.exponential_features(x)[0]
    )
    expected = np.exp(X - X.max())
    np.testing.assert_allclose(value, (WEIGHTS * (expected + FEATURE_FLOOR)).sum())
    np.testing.assert_allclose(
        gradient, WEIGHTS * expected, rtol=1e-7, atol=2 * FEATURE_FLOOR
    )
