"""A `TransformerStack` by itself."""

import numpy as np
import pytest

from keras_efficient_attn import LinearAttention, SoftmaxAttention
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
