"""Softmax attention among streaming layers is Keras' own."""

import keras
import numpy as np

from keras_efficient_attn import SoftmaxAttention
from tests.autodiff import to_numpy


def test_masks_of_queries_and_keys_make_keras_matrix():
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 8)).astype("float32")
    queries, keys = random.uniform(size=(2, 2, 5)) < 0.6
    layer = SoftmaxAttention(2, 4)
    layer.build(x.shape, x.shape)
    softmax = keras.layers.MultiHeadAttention(2, 4)
    softmax.build(x.shape, x.shape)
    softmax.set_weights(layer.get_weights())
    mask = queries[:, :, None] & keys[:, None, :]
    scored = {"return_attention_scores": True}
    expected, expected_scores = softmax(x, x, attention_mask=mask, **scored)
    received, scores = layer(x, x, query_mask=queries, key_mask=keys, **scored)
    np.testing.assert_allclose(to_numpy(received), to_numpy(expected), atol=1e-6)
    np.testing.assert_allclose(to_numpy(scores), to_numpy(expected_scores), atol=1e-6)
