"""`torch.func.grad`, `vmap` and `jacrev` of layers with their weights as arguments."""

import keras
import pytest

from keras_efficient_attn import LocalAttention, ReversibleBlock, ReversibleStack
from tests.contract.cases import LENGTH, inputs

if keras.backend.backend() != "torch":
    pytest.skip("JAX transforms layers by `stateless_call`", allow_module_level=True)

import torch


def function_of(layer, causal):
    """The layer as a function, and the weights that it takes; others are constant."""
    weights = {name: w.detach() for name, w in layer.named_parameters()}
    trained = {n: w for n, w in weights.items() if w.is_floating_point()}

    def call(trained, x):
        arguments = {**weights, **trained}, (x, x), {"use_causal_mask": causal}
        return torch.func.functional_call(layer, *arguments)

    return call, trained


def assert_close(received, expected):
    torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-5)


def test_transforms_are_those_of_the_layer(case):
    layer = case.built()
    call, trained = function_of(layer, case.usual)
    x = torch.from_numpy(inputs(length=LENGTH))
    weight = torch.randn(x.shape)

    def loss(trained, x):
        return (call(trained, x) * weight[: len(x)]).sum()

    received = torch.func.grad(loss, argnums=1)(trained, x)
    own = x.clone().requires_grad_()
    (layer(own, own, use_causal_mask=case.usual) * weight).sum().backward()
    assert_close(received, own.grad)

    rows = torch.stack([x, 0.5 * x])
    received = torch.func.vmap(call, (None, 0))(trained, rows)
    assert_close(received, torch.stack([call(trained, row) for row in rows]))
    received = torch.func.vmap(torch.func.grad(loss, 1), (None, 0))(trained, rows)
    assert_close(received[0], own.grad)


@pytest.mark.once_a_layer
def test_a_jacobian_has_all_slopes(case):
    layer = case.built()
    call, trained = function_of(layer, case.usual)
    x = torch.from_numpy(inputs(length=4))
    direction = torch.randn(x.shape)
    # Of each position.
    jacobian = torch.func.jacrev(lambda x: call(trained, x).sum((0, 2)))(x)
    received = (jacobian * direction).sum((1, 2, 3))
    for position, slope in enumerate(received):
        own = x.clone().requires_grad_()
        layer(own, own, use_causal_mask=case.usual)[:, position].sum().backward()
        assert_close(slope, (own.grad * direction).sum())


def test_a_reversible_stack_is_transformed():
    def attention(x):
        layer = LocalAttention(2, 4, window=4)
        inputs = keras.Input(x)
        return keras.Model(inputs, layer(inputs, inputs))

    block = ReversibleBlock(attention((8, 6)), keras.layers.Dense(6))
    stack = ReversibleStack([block])
    x = torch.randn(2, 8, 6)
    stack(x)
    weights = {name: w.detach() for name, w in stack.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(stack, weights, (x,)).square().sum()

    received = torch.func.vmap(torch.func.grad(loss, 1), (None, 0))(weights, x[:, None])
    own = x.clone().requires_grad_()
    stack(own).square().sum().backward()
    assert_close(received[:, 0], own.grad)
