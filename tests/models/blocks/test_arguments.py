"""Arguments of blocks' parts are checked by their constructors."""

import keras
import pytest

from keras_efficient_attn import SoftmaxAttention, models

pytestmark = pytest.mark.any_backend


def block(**options):
    return models.TransformerBlock(
        SoftmaxAttention(2, 4), models.FeedForward(8), **options
    )


def backbone(**options):
    return models.EfficientTransformerBackbone(8, 1, 1, 4, 4, **options)


WRONG = {
    "hidden_dim=True": [lambda: models.FeedForward(True)],
    "hidden_dim=0": [lambda: models.SeparableConvolution(0)],
    r"kernel_sizes=\(3, True\)": [
        lambda: models.SeparableConvolution(4, kernel_sizes=(3, True))
    ],
    "kernel_sizes=3": [lambda: models.SeparableConvolution(4, kernel_sizes=3)],
    "kernel_size=1": [lambda: models.CausalConvolution(1)],
    "max_offset=True": [lambda: models.SinusoidalPositions(max_offset=True)],
    "max_length=0": [lambda: models.LearnedPositions(0)],
    "num_recurrences=True": [lambda: models.TransformerStack([], True)],
    "`gated` must be a boolean.*gated='no'": [
        lambda: models.FeedForward(8, gated="no"),
        lambda: models.FeedForwardOptions(gated="no"),
    ],
    "`chunk_size` must be an integer or None.*chunk_size=2.5": [
        lambda: models.FeedForwardOptions(chunk_size=2.5)
    ],
    "`norm_epsilon` must be a number.*norm_epsilon='small'": [
        lambda: models.ResidualOptions(norm_epsilon="small")
    ],
    "`norm_epsilon` must be a positive number.*norm_epsilon=0": [
        lambda: block(norm_epsilon=0)
    ],
    "`scale` must be a boolean.*scale=1": [lambda: models.EmbeddingOptions(scale=1)],
    "`each_layer` must be a boolean.*each_layer='yes'": [
        lambda: models.PositionOptions("sinusoidal", each_layer="yes")
    ],
    "`causal` must be a boolean.*causal=1": [
        lambda: block(causal=1),
        lambda: models.SeparableConvolution(8, causal=1),
    ],
    "`use_bias` must be a boolean.*use_bias=1": [
        lambda: models.SeparableConvolution(8, use_bias=1)
    ],
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


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values_are_refused_by_the_names_of_their_arguments(message):
    for make in WRONG[message]:
        with pytest.raises(ValueError, match=message):
            make()


def test_attention_of_another_kind_is_refused():
    attention = keras.layers.MultiHeadAttention(2, 4)
    with pytest.raises(TypeError, match="must be an `EfficientAttention`"):
        models.TransformerBlock(attention, models.FeedForward(8))
