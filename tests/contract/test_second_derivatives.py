"""On PyTorch, second derivatives are right or refused."""

import keras
import numpy as np
import pytest

from tests.contract.cases import LENGTH, inputs

if keras.backend.backend() != "torch":
    pytest.skip("on JAX and TensorFlow the backend sees to it", allow_module_level=True)

import torch


def slopes(layer, values, direction, weight, causal, create_graph):
    """The inputs, and the derivative of a layer's loss along a direction."""
    x = torch.from_numpy(values).requires_grad_()
    loss = (layer(x, x, use_causal_mask=causal).sin() * weight).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=create_graph)
    return x, (gradient * direction).sum()


@pytest.mark.parametrize("length", [5, LENGTH])
def test_second_derivatives_are_right_or_refused(setting, length):
    case, causal = setting
    if case.name == "favor++":
        pytest.skip("gradients take its statistics as constants, differences do not")
    layer = case.built(dtype="float64")
    random = np.random.default_rng(3)
    values = inputs(length=length).astype("float64")
    first, second, weight = (random.normal(size=values.shape) for _ in range(3))
    arguments = torch.from_numpy(first), torch.from_numpy(weight), causal
    try:
        x, slope = slopes(layer, values, *arguments, create_graph=True)
        (received,) = torch.autograd.grad(slope, x)
    except NotImplementedError as error:
        assert "Second derivatives" in str(error)
        return
    step = 1e-5
    after, before = (
        slopes(layer, values + s * second, *arguments, create_graph=False)[1].item()
        for s in (step, -step)
    )
    expected = (after - before) / (2 * step)
    size = np.linalg.norm(received) * np.linalg.norm(second)
    assert abs((received.numpy() * second).sum() - expected) < 1e-5 * size
