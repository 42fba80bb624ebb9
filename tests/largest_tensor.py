"""The largest tensor in a function and its gradient, and the bytes of temporaries."""

import math
import re

import keras

SHAPE = re.compile(r"\b[a-z]+\d+\[(\d+(?:,\d+)*)\]")


def largest_tensor(loss, x):
    """Elements of the largest tensor in a scalar `loss` and its gradient."""
    backend = keras.backend.backend()
    return {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[backend](loss, x)


def temporary_bytes(function, *inputs):
    """Bytes of temporaries of `function`, compiled by JAX.

    Args:
        function: Of tensors, in JAX.
        inputs: Arrays, or lists of arrays, or what describes their shapes.
    """
    import jax

    program = jax.jit(function).lower(*inputs).compile()
    return program.memory_analysis().temp_size_in_bytes


def _jax(loss, x):
    import jax

    return _in_program(jax.jit(jax.grad(loss)).lower(x).as_text(dialect="hlo"))


def _tensorflow(loss, x):
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return tape.gradient(value, x)

    program = gradient.experimental_get_compiler_ir(tf.constant(x))
    return _in_program(program(stage="hlo"))


def _torch(loss, x):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, torch.Tensor):
                    sizes.append(tensor.numel())
            return result

    tensor = torch.tensor(x, requires_grad=True)
    with Record():
        loss(tensor).backward()
    return max(sizes)


def _in_program(text):
    sizes = (match.split(",") for match in SHAPE.findall(text))
    return max(math.prod(map(int, size)) for size in sizes)
