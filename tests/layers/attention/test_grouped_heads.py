"""Query heads that share key and value heads."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import (
    FourierAttention,
    LocalAttention,
    PerformerAttention,
    ReformerLSHAttention,
)
from tests.layers.streams import stream

DIM, LENGTH = 12, 6


def make(layer_class, *args, **options):
    layer = layer_class(*args, **options)
    layer.build((None, None, DIM), (None, None, DIM))
    random = np.random.default_rng(0)
    for weight in layer.trainable_weights:
        weight.assign(random.normal(size=weight.shape) * 0.3)
    return layer


@pytest.mark.parametrize("use_gate", [False, True])
def test_exact_attention_equals_keras_grouped_query_attention(use_gate):
    keras_layer = make(keras.layers.GroupQueryAttention, 4, 6, 2, use_gate=use_gate)
    layer = make(
        PerformerAttention,
        6,
        4,
        num_key_value_heads=2,
        window=LENGTH,
        num_features=4,
        use_gate=use_gate,
    )
    layer.set_weights(keras_layer.get_weights())
    x = np.random.default_rng(1).normal(size=(2, LENGTH, DIM)).astype("float32")
    expected, scores = keras_layer(
        x, x, use_causal_mask=True, return_attention_scores=True
    )
    output = layer(x, x, use_causal_mask=True)
    np.testing.assert_allclose(
        ops.convert_to_numpy(output), ops.convert_to_numpy(expected), atol=1e-5
    )
    _, own = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    np.testing.assert_allclose(
        ops.convert_to_numpy(own), ops.convert_to_numpy(scores), atol=1e-5
    )
    again = PerformerAttention.from_config(layer.get_config())
    assert again.num_key_value_heads == 2

    streamed, _ = stream(layer, x, (1,) * LENGTH)
    np.testing.assert_allclose(streamed, ops.convert_to_numpy(output), atol=1e-5)


def test_invalid_numbers_of_heads():
    for layer_class, number in ((LocalAttention, 0), (FourierAttention, 4)):
        with pytest.raises(ValueError, match=f"num_key_value_heads={number}"):
            layer_class(6, 4, num_key_value_heads=number)
    with pytest.raises(ValueError, match="same vectors.*num_key_value_heads=2"):
        ReformerLSHAttention(6, 4, num_key_value_heads=2)
