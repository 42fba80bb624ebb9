"""Linear attention layers with the TPU's kernel, interpreted by Pallas."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.ops.common.feature_kernels import choice
from tests.autodiff import gradients

BATCH, LENGTH, DIM = 2, 139, 12
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Pallas is JAX's"
)


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear:feature_map=hedgehog",
        "linear:feature_map=relu,normalize=False",
        "performer:num_features=16",
        "performer:num_features=16,window=5",
    ],
)
def test_the_kernel_gives_outputs_and_gradients_of_the_chunks(name, monkeypatch):
    layer = get_attention(name, num_heads=2, key_dim=8, seed=1)
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(2, BATCH, LENGTH, DIM)).astype("float32")
    layer.build(x.shape, x.shape)
    mask = np.arange(LENGTH) < np.array([[LENGTH], [90]])

    def loss(x):
        output = layer(x, x, query_mask=mask, value_mask=mask, use_causal_mask=True)
        return ops.sum(ops.multiply(output, weight))

    layer.chunk_size = 64
    (expected,) = gradients(loss, x)
    asked = []
    monkeypatch.setattr(choice, "has_kernels", lambda query: asked.append(1) or True)
    # A chunk size selects the chunked form.
    layer.chunk_size = None
    (received,) = gradients(loss, x)
    assert asked
    size = np.abs(expected).max()
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4 * size)
