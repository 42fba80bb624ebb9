"""Arguments of blocks' parts are checked by their constructors."""

import keras
import pytest

from keras_efficient_attn import models

pytestmark = pytest.mark.any_backend

WRONG = {
    "hidden_dim=True": lambda: models.FeedForward(True),
    "hidden_dim=0": lambda: models.SeparableConvolution(0),
    r"kernel_sizes=\(3, True\)": lambda: models.SeparableConvolution(
        4, kernel_sizes=(3, True)
    ),
    "kernel_sizes=3": lambda: models.SeparableConvolution(4, kernel_sizes=3),
    "kernel_size=1": lambda: models.CausalConvolution(1),
    "max_offset=True": lambda: models.SinusoidalPositions(max_offset=True),
    "max_length=0": lambda: models.LearnedPositions(0),
    "num_recurrences=True": lambda: models.TransformerStack([], True),
}


@pytest.mark.parametrize("message", WRONG)
def test_integers_in_their_range(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_attention_of_another_kind_is_refused():
    attention = keras.layers.MultiHeadAttention(2, 4)
    with pytest.raises(TypeError, match="must be an `EfficientAttention`"):
        models.TransformerBlock(attention, models.FeedForward(8))
