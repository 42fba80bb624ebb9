"""On PyTorch, `torch.compile` makes one program of a layer's call, without a break."""

import keras
import pytest

from tests.contract.cases import inputs

if keras.backend.backend() != "torch":
    pytest.skip("torch.compile is PyTorch's", allow_module_level=True)

import torch

# Long enough for several chunks, blocks and buckets.
LENGTH = 9


def count_breaks(layer, x, causal):
    """Graph breaks of a training step's forward pass.

    Its output and gradient are compared with those of an eager call.
    """
    programs = []

    def keep(program, _):
        programs.append(program)
        return program.forward

    def call(x):
        return layer(x, x, use_causal_mask=causal, training=True)

    before = [variable.value.clone() for variable in layer.variables]
    expected = call(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    # Codes and seeds have moved.
    for variable, value in zip(layer.variables, before, strict=True):
        variable.assign(value)
    torch.compiler.reset()
    output = torch.compile(call, backend=keep)(x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    (found,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(found, slope, rtol=1e-4, atol=1e-4)
    return len(programs) - 1


@pytest.mark.once_a_layer
def test_a_layer_is_one_program(case):
    layer = case.built()
    x = torch.from_numpy(inputs(length=LENGTH)).requires_grad_()
    assert count_breaks(layer, x, case.usual) == 0
