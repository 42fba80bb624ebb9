"""A `TransformerBlock` by itself."""

import keras
import pytest

from keras_efficient_attn.models import FeedForward, TransformerBlock


def test_attention_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="must be an `EfficientAttention`"):
        TransformerBlock(keras.layers.MultiHeadAttention(2, 4), FeedForward(8))
