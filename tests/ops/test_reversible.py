"""A reversible chain, on PyTorch, under autocast."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.ops.reversible.api import Half, reversible_chain

if keras.backend.backend() != "torch":
    pytest.skip("PyTorch alone has autocast", allow_module_level=True)
import torch


def test_the_second_run_has_the_autocast_of_the_first():
    random = np.random.default_rng(0)
    kernels = torch.tensor(random.normal(size=(2, 32, 32)) / 6, dtype=torch.float32)
    kernels = [kernel.requires_grad_() for kernel in kernels.clone()]
    streams = torch.tensor(random.normal(size=(2, 4, 32)), dtype=torch.float32)
    x1, x2 = (x.requires_grad_() for x in streams.clone())

    def function(x, parameters, states, tensors):
        return torch.tanh(x @ parameters[0]).float(), {}, ()

    def plain(x1, x2):
        y1 = x1 + function(x2, kernels[:1], (), ())[0]
        return y1, x2 + function(y1, kernels[1:], (), ())[0]

    def rebuilt(x1, x2):
        halves = [Half(function, (i,), ()) for i in range(2)]
        return reversible_chain(halves, x1, x2, kernels, (), ())[:2]

    def gradients(chain, enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            y1, y2 = chain(x1, x2)
        loss = (y1 * y1).sum() + (y2 * y2).sum()
        return torch.autograd.grad(loss, [x1, x2, *kernels])

    for enabled in (True, False):
        pairs = zip(gradients(rebuilt, enabled), gradients(plain, enabled), strict=True)
        for received, expected in pairs:
            np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)
