"""A `TransformerStack` by itself."""

import numpy as np
import pytest

from keras_efficient_attn import (
    AdaptiveSpan,
    LinearAttention,
    RelativePositionXL,
    SoftmaxAttention,
)
from keras_efficient_attn.models import FeedForward, TransformerBlock, TransformerStack
from tests.autodiff import to_numpy


def reversible_block():
    return TransformerBlock(
        LinearAttention(2, 4),
        FeedForward(8),
        cross_attention=SoftmaxAttention(2, 4),
        residual="reversible",
    )


@pytest.mark.parametrize("training", [False, True])
def test_three_sublayers_update_two_streams_in_turns(training):
    stack = TransformerStack([reversible_block(), reversible_block()])
    random = np.random.default_rng(0)
    x, memory = (random.normal(size=(2, n, 8)).astype("float32") for n in (5, 3))
    expected = to_numpy(stack(x, memory=memory))
    kept, layers = stack(x, memory=memory, return_layers=True, training=training)
    np.testing.assert_allclose(to_numpy(kept), expected, rtol=1e-5, atol=1e-6)
    assert len(layers) == 2
    state, outputs = stack.get_initial_state(2), []
    for segment in (x[:, :3], x[:, 3:4], x[:, 4:]):
        output, state = stack(segment, memory=memory, state=state)
        outputs.append(to_numpy(output))
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-6
    )


def test_layers_that_say_so_share_weights_with_those_of_their_class():
    stack = TransformerStack(
        [
            TransformerBlock(layer_class(2, 4, **{option: choice}), FeedForward(8))
            for layer_class, option, common in (
                (AdaptiveSpan, "relative_positions", True),
                (RelativePositionXL, "biases", "own"),
            )
            for choice in ("shared", common, "shared")
        ]
    )
    for made in (stack, TransformerStack.from_config(stack.get_config())):
        x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
        made(x)
        layers = [block.attention for block in made.blocks]
        tables = [layer._position_keys for layer in layers[:3]]
        biases = [layer.biases for layer in layers[3:]]
        for first, other, last in (tables, biases):
            assert first is last and first is not other


def test_output_dropout_acts_on_the_last_output():
    rate = 0.25
    block = TransformerBlock(LinearAttention(2, 4), FeedForward(8))
    stack = TransformerStack([block], output_dropout=rate)
    x = np.random.default_rng(0).normal(size=(50, 5, 8)).astype("float32")
    plain, trained = to_numpy(stack(x)), to_numpy(stack(x, training=True))
    kept = trained != 0
    np.testing.assert_allclose(
        trained, np.where(kept, plain / (1 - rate), 0.0), rtol=1e-5, atol=1e-6
    )
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / kept.size)
    again = TransformerStack.from_config(stack.get_config())
    assert again.output_dropout.rate == rate
