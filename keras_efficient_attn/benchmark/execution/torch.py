"""PyTorch: eager."""

import torch

from keras_efficient_attn.benchmark.execution import is_float
from keras_efficient_attn.benchmark.memory import peak_increase


class Program:
    """See `keras_efficient_attn.benchmark.execution`."""

    execution = "eager"

    def __init__(
        self, function, trainable=(), fixed=(), gradients=False, optimizer=None
    ):
        self._function = function
        self._trainable = [variable.value for variable in trainable]
        self._optimizer = optimizer
        self._run = self._differentiate if gradients else torch.no_grad()(function)

    def __call__(self, *inputs):
        return self._run(*inputs)

    def _differentiate(self, cotangent, *inputs):
        inputs = [x.detach().requires_grad_(True) if is_float(x) else x for x in inputs]
        floats = [x for x in inputs if is_float(x)]
        output = self._function(*inputs)
        gradients = torch.autograd.grad(
            output, floats + self._trainable, cotangent, materialize_grads=True
        )
        grad_inputs, grad_weights = gradients[: len(floats)], gradients[len(floats) :]
        if self._optimizer is None:
            return [output.detach(), *grad_inputs, *grad_weights]
        with torch.no_grad():
            self._optimizer.apply(list(grad_weights))
        return [output.detach(), *grad_inputs]


def wait(outputs):
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(program, inputs):
    if not torch.cuda.is_available():
        return peak_increase(lambda: program(*inputs)), "resident increase"
    torch.cuda.reset_peak_memory_stats()
    program(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), "device"


def device():
    if torch.cuda.is_available():
        return f"gpu: {torch.cuda.get_device_name()}"
    return "cpu"
