"""Arguments of blocks' parts are checked by their constructors."""

import keras
import pytest

from keras_efficient_attn import SoftmaxAttention, models

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


def block(**options):
    return models.TransformerBlock(
        SoftmaxAttention(2, 4), models.FeedForward(8), **options
    )


def backbone(**options):
    return models.EfficientTransformerBackbone(8, 1, 1, 4, 4, **options)


RATES = {
    "`dropout`.*dropout=2.0": [
        lambda: models.FeedForward(8, dropout=2.0),
        lambda: block(dropout=2.0),
        lambda: backbone(dropout=2.0),
        lambda: backbone(feed_forward={"dropout": 2.0}),
        lambda: models.EfficientTextClassifier(backbone(), 2, dropout=2.0),
    ],
    "`layer_dropout`.*layer_dropout=1": [
        lambda: block(layer_dropout=1),
        lambda: backbone(residual={"layer_dropout": 1}),
    ],
    "`output_dropout`.*output_dropout=-1": [
        lambda: models.TransformerStack([block()], output_dropout=-1),
        lambda: backbone(residual={"output_dropout": -1}),
    ],
}


@pytest.mark.parametrize("message", RATES)
def test_rates_of_dropout_have_the_names_of_their_arguments(message):
    for make in RATES[message]:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("argument", ["causal", "use_bias"])
def test_booleans_of_a_separable_convolution(argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be a boolean.*=1"):
        models.SeparableConvolution(8, **{argument: 1})


def test_attention_of_another_kind_is_refused():
    attention = keras.layers.MultiHeadAttention(2, 4)
    with pytest.raises(TypeError, match="must be an `EfficientAttention`"):
        models.TransformerBlock(attention, models.FeedForward(8))
