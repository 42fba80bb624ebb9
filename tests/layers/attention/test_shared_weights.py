"""Layers that share weights, in a file: they share them again, or are not saved."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import (
    AdaptiveComputationTime,
    AdaptiveSpan,
    ChunkedFeedForward,
    RelativePositionXL,
    ReversibleBlock,
    ReversibleStack,
)
from keras_efficient_attn.layers.attention.transformer_xl import PositionBiases
from keras_efficient_attn.models import FeedForward, TransformerBlock, TransformerStack
from tests.autodiff import to_numpy
from tests.saving import assert_same_model, saved_and_loaded

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
SPAN = dict(num_heads=2, key_dim=4, max_span=8, initial_span=4)


def stacked(make):
    """Two layers in a stack."""
    x = keras.Input((None, 8))
    blocks = [TransformerBlock(make(), FeedForward(12)) for _ in "ab"]
    return keras.Model(x, TransformerStack(blocks)(x))


def alone(first, second):
    """Two layers in a functional model."""
    x = keras.Input((None, 8))
    y = first(x, x)
    return keras.Model(x, second(y, y))


def given_biases():
    biases = PositionBiases(2, 4)
    return alone(*(RelativePositionXL(2, 4, biases=biases) for _ in "ab"))


def one_layer_in_two(wrap):
    """A dense layer that two layers around it hold."""
    x, dense = keras.Input((None, 8)), keras.layers.Dense(8, "tanh")
    return keras.Model(x, wrap(dense)(wrap(dense)(x)))


def reversible():
    x, dense = keras.Input((None, 8)), keras.layers.Dense(8)
    blocks = [ReversibleBlock(dense, keras.layers.Dense(8)) for _ in "ab"]
    return keras.Model(x, ReversibleStack(blocks)(x))


# Models, and the numbers of weights that they have.
SAVED = {
    "chunked": (lambda: one_layer_in_two(lambda x: ChunkedFeedForward(x, 2)), 2),
    # Each has a halting unit.
    "adaptive": (lambda: one_layer_in_two(lambda x: AdaptiveComputationTime(x, 3)), 6),
    "reversible": (reversible, 6),
    # A block has four projections, one of positions, two dense layers and two norms;
    # the stack has the biases u and v, and a norm.
    "xl-stack": (
        lambda: stacked(lambda: RelativePositionXL(2, 4, biases="shared")),
        2 * (4 * 2 + 1 + 2 * 2 + 2 * 2) + 2 + 2,
    ),
    # With spans instead of the projection of positions, and a table.
    "span-stack": (
        lambda: stacked(lambda: AdaptiveSpan(relative_positions="shared", **SPAN)),
        2 * (4 * 2 + 1 + 2 * 2 + 2 * 2) + 1 + 2,
    ),
    "xl-given": (given_biases, 2 * (4 * 2 + 1) + 2),
}


@pytest.mark.any_backend
@pytest.mark.parametrize("name", SAVED)
def test_sharing_survives(name, tmp_path):
    make, number = SAVED[name]
    model, random = make(), np.random.default_rng(1)
    assert len(model.weights) == number
    for weight in model.weights:
        weight.assign(0.3 * random.normal(size=weight.shape))
    restored = saved_and_loaded(model, tmp_path)
    assert_same_model(restored, model, X, rtol=1e-7, atol=1e-5)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "make",
    [
        lambda: RelativePositionXL(2, 4),
        lambda: RelativePositionXL(2, 4, biases="shared"),
        lambda: AdaptiveSpan(relative_positions=True, **SPAN),
    ],
    ids=["xl-own", "xl-shared", "span"],
)
def test_what_a_configuration_cannot_say_is_refused_when_saved(make, tmp_path):
    def shared():
        first, second = make(), make()
        second.share_weights_with(first)
        return alone(first, second)

    model, other = shared(), shared()
    with pytest.raises(ValueError, match="share_weights_with.*TransformerStack"):
        model.save(tmp_path / "model.keras")
    # Weights alone, into a model that shares them too.
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(to_numpy(other(X)), to_numpy(model(X)), atol=1e-5)
