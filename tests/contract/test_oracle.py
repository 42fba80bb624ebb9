"""Point 2: every output and gradient equals the dense definition's."""

import itertools

import numpy as np
import pytest
from keras import ops

from tests import dense
from tests.autodiff import gradients, to_numpy
from tests.contract.cases import BATCH, DIM, LENGTH, inputs


def test_values_and_scores(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    output, scores = layer(x, x, use_causal_mask=causal, return_attention_scores=True)
    expected, weights = case.oracle(layer, x, x, causal=causal)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_numpy(scores), weights, rtol=1e-4, atol=1e-5)


def test_gradient_is_the_slope_of_the_dense_definition(setting, monkeypatch):
    case, causal = setting
    layer, x = case.built(), inputs()
    weight, direction = inputs(seed=3), inputs(seed=4).astype("float64")

    def loss(x):
        return ops.sum(ops.multiply(layer(x, x, use_causal_mask=causal), weight))

    def dense_loss(step):
        moved = x + step * direction
        return (case.oracle(layer, moved, moved, causal=causal)[0] * weight).sum()

    (gradient,) = gradients(loss, x)
    if case.name == "favor++":
        # Its statistics are constants for the gradient: those of `x`.
        means, measure = [], dense.mean_square_of_sums

        def record(query, key):
            means.append(measure(query, key))
            return means[-1]

        monkeypatch.setattr(dense, "mean_square_of_sums", record)
        dense_loss(0.0)
        frozen = itertools.cycle(means)
        monkeypatch.setattr(dense, "mean_square_of_sums", lambda *_: next(frozen))
    slope = (dense_loss(1e-6) - dense_loss(-1e-6)) / 2e-6
    size = np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert abs((gradient * direction).sum() - slope) < 1e-4 * size


@pytest.mark.once_a_layer
@pytest.mark.parametrize("lengths", [(1, 1), (5, 11), (11, 5)], ids=str)
def test_lengths(case, lengths):
    layer, causal = case.built(), case.usual
    query, value = inputs(length=lengths[0]), inputs(length=lengths[1], seed=5)
    if lengths[0] != lengths[1] and not case.cross:
        with pytest.raises(ValueError, match="must have the same length"):
            layer(query, value)
        return
    key = inputs(length=lengths[1], seed=6) if case.cross else query
    output = layer(query, value, key, use_causal_mask=causal)
    expected, _ = case.oracle(layer, query, value, key, causal=causal)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.once_a_layer
def test_one_head_and_other_value_dim(case):
    layer = case.make(num_heads=1, value_dim=3, output_shape=5)
    x = inputs()
    output = layer(x, x, use_causal_mask=case.usual)
    assert tuple(output.shape) == (BATCH, LENGTH, 5)
    expected, _ = case.oracle(layer, x, x, causal=case.usual)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.once_a_layer
def test_gate_multiplies_the_heads(case):
    layer, x = case.make(use_gate=True), inputs()
    output = to_numpy(layer(x, x, **case.plain))
    kernel, bias = (np.asarray(w) for w in layer._gate_dense.get_weights())
    gate = 1 / (1 + np.exp(-(np.einsum("btd,dhk->bthk", x, kernel) + bias)))

    def gated_heads(*args, **kwargs):
        heads, weights = case.heads(*args, **kwargs)
        return heads * gate, weights

    expected, _ = dense.layer_output(layer, gated_heads, x, x)
    assert output.shape == (BATCH, LENGTH, DIM)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
