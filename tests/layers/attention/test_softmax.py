"""SoftmaxAttention equals Keras' softmax attention."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import SoftmaxAttention
from keras_efficient_attn.layers.attention.softmax import KERNELS
from tests import dense
from tests.autodiff import to_numpy
from tests.largest_tensor import largest_tensor
from tests.layers.streams import stream


def test_masks_of_queries_and_keys_make_keras_matrix():
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 8)).astype("float32")
    queries, keys = random.uniform(size=(2, 2, 5)) < 0.6
    layer = SoftmaxAttention(2, 4)
    layer.build(x.shape, x.shape)
    softmax = keras.layers.MultiHeadAttention(2, 4)
    softmax.build(x.shape, x.shape)
    softmax.set_weights(layer.get_weights())
    # A hidden key is hidden as a query too.
    mask = (queries & keys)[:, :, None] & keys[:, None, :]
    scored = {"return_attention_scores": True}
    expected, expected_scores = softmax(x, x, attention_mask=mask, **scored)
    received, scores = layer(x, x, query_mask=queries, key_mask=keys, **scored)
    np.testing.assert_allclose(to_numpy(received), to_numpy(expected), atol=1e-6)
    np.testing.assert_allclose(to_numpy(scores), to_numpy(expected_scores), atol=1e-6)


def gaussian_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """Keys weigh exp(−‖q − k‖² / (2 √d))."""
    square = np.moveaxis(((query[:, :, None] - key[:, None]) ** 2).sum(-1), -1, 1)
    similarity = np.exp(-square / 2 / np.sqrt(query.shape[-1]))
    return dense.weigh(similarity, value, key_mask, causal)


def test_a_gaussian_kernel_weighs_by_distance():
    x = (2 * np.random.default_rng(0).normal(size=(2, 6, 8))).astype("float32")
    mask = np.ones((2, 6), bool)
    mask[1, 2:4] = False
    layer = SoftmaxAttention(2, 4, value_dim=7, kernel="gaussian")
    layer.build(x.shape, x.shape)
    expected, _ = dense.layer_output(
        layer, gaussian_heads, x, x, key_mask=mask, causal=True
    )
    options = dict(key_mask=mask, use_causal_mask=True)
    received = to_numpy(layer(x, x, **options))
    np.testing.assert_allclose(received[mask], expected[mask], rtol=1e-4, atol=1e-5)
    received, _ = stream(layer, x, (3, 1, 2), max_length=6, key_mask=mask)
    np.testing.assert_allclose(received[mask], expected[mask], rtol=1e-4, atol=1e-5)
    _, scores = layer(x, x, return_attention_scores=True, **options)
    sums = np.swapaxes(to_numpy(scores).sum(-1), 1, 2)[mask]
    np.testing.assert_allclose(sums, 1.0, rtol=1e-5)
    again = SoftmaxAttention.from_config(layer.get_config())
    assert again.kernel == "gaussian"


def test_a_gaussian_kernel_is_softmax_for_keys_of_one_norm():
    random = np.random.default_rng(0)
    query = 2 * random.normal(size=(2, 5, 8)).astype("float32")
    # The projection of unit vectors keeps their norm.
    key = random.normal(size=(2, 7, 4))
    key = (3 * key / np.linalg.norm(key, axis=-1, keepdims=True)).astype("float32")
    value = random.normal(size=(2, 7, 6)).astype("float32")
    layers = [SoftmaxAttention(1, 4, kernel=kernel) for kernel in KERNELS]
    for layer in layers:
        layer.build(query.shape, value.shape, key.shape)
        layer.set_weights(layers[0].get_weights())
        layer.key_dense.kernel.assign(np.eye(4)[:, None])
    expected, received = (to_numpy(layer(query, value, key=key)) for layer in layers)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)
    # Of keys of several norms it is not.
    key[:, ::2] *= 2
    expected, received = (to_numpy(layer(query, value, key=key)) for layer in layers)
    assert np.abs(received - expected).max() > 0.1


def test_kernels_that_are_refused():
    with pytest.raises(ValueError, match="kernel='linear'"):
        SoftmaxAttention(2, 4, kernel="linear")
    with pytest.raises(ValueError, match="flash_attention=True, kernel='gaussian'"):
        SoftmaxAttention(2, 4, kernel="gaussian", flash_attention=True)


@pytest.mark.any_backend
def test_keras_setting_of_flash_attention_is_passed_on(monkeypatch):
    received, attend = [], keras.ops.dot_product_attention

    def record(*args, flash_attention, **kwargs):
        received.append(flash_attention)
        return attend(*args, flash_attention=False, **kwargs)

    monkeypatch.setattr(keras.ops, "dot_product_attention", record)
    x = np.ones((1, 3, 8), "float32")
    SoftmaxAttention(2, 4)(x, x)
    keras.config.disable_flash_attention()
    try:
        SoftmaxAttention(2, 4)(x, x)
    finally:
        # Keras' default.
        keras.config.enable_flash_attention()
    SoftmaxAttention(2, 4, flash_attention=True)(x, x)
    assert received == [None, False, True]


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="only PyTorch has a kernel on a CPU"
)
def test_the_causal_kernel_needs_no_mask():
    length = 256
    x = np.ones((1, length, 8), "float32")
    layer = SoftmaxAttention(1, 4)
    layer.build(x.shape, x.shape)

    def loss(x):
        return keras.ops.sum(layer(x, x, use_causal_mask=True))

    assert largest_tensor(loss, x) < length**2 / 4


def test_the_output_projection_has_its_own_bias():
    x = np.random.default_rng(0).normal(size=(1, 5, 6)).astype("float32")
    layer = SoftmaxAttention(2, 4, use_output_bias=False)
    layer.build(x.shape, x.shape)
    assert layer.query_dense.bias is not None and layer.output_dense.bias is None
    again = SoftmaxAttention.from_config(layer.get_config())
    again.build(x.shape, x.shape)
    assert again.output_dense.bias is None
    with pytest.raises(ValueError, match="`projection_norm` must be 'rms'.*'layer'"):
        SoftmaxAttention(2, 4, projection_norm="layer")
