"""`attention_axes` means the same as in `keras.layers.MultiHeadAttention`."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import LocalAttention, PerformerAttention, SoftmaxAttention
from tests.autodiff import to_numpy

SHAPE = (2, 3, 4, 5, 6)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


@pytest.mark.parametrize("axes", [None, 1, 2, (2, 3), (1, 3), (-2,)], ids=str)
def test_softmax_equals_keras_along_any_axes(axes):
    x, other = draw(*SHAPE), draw(*SHAPE, seed=1)
    options = dict(num_heads=2, key_dim=3, attention_axes=axes)
    keras_layer = keras.layers.MultiHeadAttention(**options)
    expected, expected_scores = keras_layer(x, other, return_attention_scores=True)
    layer = SoftmaxAttention(**options)
    layer.build(SHAPE, SHAPE)
    layer.set_weights(keras_layer.get_weights())
    output, scores = layer(x, other, return_attention_scores=True)
    np.testing.assert_allclose(to_numpy(output), to_numpy(expected), atol=1e-5)
    assert tuple(scores.shape) == tuple(expected_scores.shape)
    np.testing.assert_allclose(to_numpy(scores), to_numpy(expected_scores), atol=1e-5)
    symbolic = keras.Input(SHAPE[1:])
    spec = layer(symbolic, symbolic, return_attention_scores=True)
    assert [s.shape[1:] for s in spec] == [output.shape[1:], scores.shape[1:]]


def test_other_axes_fold_into_the_batch():
    x = draw(2, 3, 7, 6)
    layer = PerformerAttention(2, 4, feature_map="elu", attention_axes=2)
    mask = np.random.default_rng(2).random((2, 3, 7)) > 0.3
    output = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=True))
    rows = zip(x.reshape(6, 7, 6), mask.reshape(6, 7), strict=True)
    single = PerformerAttention(2, 4, feature_map="elu")
    single.build((1, 7, 6), (1, 7, 6))
    single.set_weights(layer.get_weights())
    expected = [
        to_numpy(single(row[None], row[None], key_mask=m[None], use_causal_mask=True))
        for row, m in rows
    ]
    expected = np.concatenate(expected).reshape(output.shape)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_axes_are_saved_as_given():
    layer = LocalAttention(2, 4, window=3, attention_axes=(2,))
    layer.build((2, 3, 7, 6), (2, 3, 7, 6))
    copy = LocalAttention.from_config(layer.get_config())
    copy.build((2, 3, 7, 6), (2, 3, 7, 6))
    copy.set_weights(layer.get_weights())
    x = draw(2, 3, 7, 6)
    np.testing.assert_array_equal(to_numpy(layer(x, x)), to_numpy(copy(x, x)))


@pytest.mark.parametrize("axes", [0, 3, 7, -1, (), (1, 1), (2, -2)], ids=str)
def test_axes_that_are_none(axes):
    layer = PerformerAttention(2, 4, feature_map="elu", attention_axes=axes)
    with pytest.raises(ValueError, match="attention_axes="):
        layer(draw(2, 3, 4, 6), draw(2, 3, 4, 6))


def test_a_state_needs_one_sequence():
    layer = PerformerAttention(2, 4, feature_map="elu", attention_axes=2)
    x = draw(2, 3, 4, 6)
    layer.build(x.shape, x.shape)
    with pytest.raises(ValueError, match="attention_axes="):
        layer(x, x, use_causal_mask=True, state=layer.get_initial_state(6))
