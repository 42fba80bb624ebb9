"""Norms of queries and keys at rows of zeros, whose direction is not defined."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.layers import get_attention
from tests.autodiff import gradient_function


@pytest.mark.parametrize(
    "name",
    [
        "reformer",
        "delta:convolution=None",
        "kimi-delta:convolution=None",
        "gated-delta:convolution=None",
        "linear:qk_norm=True",
        "linear:feature_map=unit,normalize=False",
        "performer:qk_norm=True",
        "vq:num_codes=8",
        "fourier",
    ],
)
def test_gradients_at_zero_are_of_the_size_of_their_neighbours(name):
    layer = get_attention(name, num_heads=2, key_dim=8)
    random = np.random.default_rng(0)
    x, upstream = random.normal(size=(2, 1, 48, 12)).astype("float32")
    x[:, [0, 20]] = 0

    def loss(x):
        return ops.sum(layer(x, x, use_causal_mask=True) * upstream)

    layer.build(x.shape, x.shape)
    upstream = ops.convert_to_tensor(upstream)
    (gradient,) = gradient_function(loss)(x)
    sizes = np.linalg.norm(gradient[0], axis=-1)
    others = np.delete(sizes, [0, 20])
    assert np.all(sizes[[0, 20]] < 10 * others.max())
