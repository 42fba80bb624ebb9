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
    """Graph breaks of a training step's forward pass; also runs the backward pass."""
    programs = []

    def keep(program, _):
        programs.append(program)
        return program.forward

    def call(x):
        return layer(x, x, use_causal_mask=causal, training=True)

    torch.compiler.reset()
    output = torch.compile(call, backend=keep)(x)
    output.sum().backward()
    assert x.grad is not None
    return len(programs) - 1


@pytest.mark.once_a_layer
def test_a_layer_is_one_program(case):
    layer = case.built()
    x = torch.from_numpy(inputs(length=LENGTH)).requires_grad_()
    assert count_breaks(layer, x, case.usual) == 0
