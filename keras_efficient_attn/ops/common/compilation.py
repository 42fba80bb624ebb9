"""Compiles whole operations on JAX, and the slowest parts on PyTorch."""

import functools
import inspect

from keras_efficient_attn.ops.common.backend import BACKEND, is_traced_by_torch
from keras_efficient_attn.ops.common.plan import device_kind


def jit_on_jax(*static_arguments):
    """Decorator: on JAX, compiles the function once per value of the arguments named.

    On other backends the function is called directly: TensorFlow compiles whole models,
    and PyTorch would compile for half a minute for little gain.
    """

    def decorate(function):
        if BACKEND != "jax":
            return function
        import jax

        @functools.cache
        def jit(device_kind):
            # One object per plan: JAX caches compiled functions by object.
            own = functools.wraps(function)(functools.partial(function))
            return jax.jit(own, static_argnames=static_arguments)

        @functools.wraps(function)
        def call(*args, **kwargs):
            return jit(device_kind())(*args, **kwargs)

        return call

    return decorate


def opaque_on_torch(function):
    """Decorator: for `torch.compile`, the function is one operation.

    It may read values, and its loops are not unrolled. It has no gradient.

    Args:
        function: Function of tensors; its result has the first tensor's shape and
            dtype.
    """
    if BACKEND != "torch":
        return function
    import torch

    names = inspect.signature(function).parameters
    arguments = ", ".join(f"Tensor {name}" for name in names)
    operation = torch.library.custom_op(
        f"keras_efficient_attn::{function.__name__}",
        # A result may not be an argument itself.
        lambda *tensors: function(*tensors).clone(),
        mutates_args=(),
        schema=f"({arguments}) -> Tensor",
    )
    operation.register_fake(lambda first, *_: torch.empty_like(first))

    @functools.wraps(function)
    def call(*tensors):
        return (operation if is_traced_by_torch() else function)(*tensors)

    return call


def compile_on_torch(function):
    """Decorator: on PyTorch, compiles the function by `torch.compile`.

    Elsewhere, and if PyTorch compiles the caller, the function is unchanged. The first
    call, and the first with other shapes, includes the compile time.
    """

    @functools.cache
    def compile_once():
        import torch

        return torch.compile(function)

    @functools.wraps(function)
    def call(*args):
        if BACKEND == "torch" and not is_traced_by_torch():
            return compile_once()(*args)
        return function(*args)

    return call
