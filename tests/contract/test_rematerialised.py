"""Layers in `keras.RematScope` compute again what they have computed."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import PerformerAttention, VQAttention
from keras_efficient_attn.layers import get_attention
from tests.autodiff import gradients
from tests.contract.cases import LENGTH, inputs

MASK = np.arange(LENGTH) < np.array([[LENGTH], [21]])


def with_mask(layer, x):
    return layer(x, x, key_mask=MASK, training=True)


def through_a_state(layer, x):
    """The output of the second of two segments."""
    state = layer.get_initial_state(len(x))
    for part in (x[:, :2], x[:, 2:]):
        output, state = layer(part, part, use_causal_mask=True, state=state)
    return output


@pytest.mark.parametrize(
    ("name", "call"),
    [
        # They know that queries and keys are one sequence.
        ("reformer", with_mask),
        ("local:window=3", with_mask),
        ("linear", through_a_state),
    ],
    ids=["reformer", "local", "state"],
)
def test_gradients_are_those_of_plain_layers(name, call):
    x, received = inputs(), []
    for mode in (None, "full"):
        keras.utils.set_random_seed(0)
        with keras.RematScope(mode=mode):
            layer = get_attention(name, num_heads=2, key_dim=4, seed=1)
        layer.build(x.shape, x.shape)

        def loss(x, layer=layer):
            return ops.sum(ops.square(call(layer, x)))

        received += gradients(loss, x)
    assert np.abs(received[0][:, :2]).max() > 1e-3
    np.testing.assert_allclose(received[1], received[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "steps", "length"),
    [
        (
            lambda: PerformerAttention(1, 4, num_features=8, redraw_interval=3, seed=0),
            4,
            None,
        ),
        (
            lambda: VQAttention(
                2,
                4,
                num_codes=5,
                window=3,
                block_length=8,
                codes={"init": "random", "revive_after": None},
                seed=1,
            ),
            1,
            20,
        ),
    ],
    ids=["performer", "vq"],
)
def test_training_steps_draw_and_update_once(make, steps, length):
    x, trained = inputs(length=20), []
    for mode in (None, "full"):
        keras.utils.set_random_seed(0)
        with keras.RematScope(mode=mode):
            layer = make()
        sequence = keras.Input((length, x.shape[-1]))
        model = keras.Model(sequence, layer(sequence, sequence))
        model.compile("sgd", "mse", jit_compile=False)
        for _ in range(steps):
            model.train_on_batch(x, x)
        trained.append(layer.get_weights())
    for plain, rematerialised in zip(*trained, strict=True):
        np.testing.assert_allclose(rematerialised, plain, rtol=1e-5, atol=1e-6)
