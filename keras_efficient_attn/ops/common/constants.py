"""Tensors of numbers that NumPy computes from sizes and settings."""

from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name


def _computed(function, arguments, dtype):
    return ops.convert_to_tensor(function(*arguments), dtype)


if backend_name() == "torch":
    import torch

    _computed = torch.compiler.assume_constant_result(_computed)


def constant(function, *arguments, dtype):
    """`function(*arguments)`, an array, as a tensor.

    Args:
        function: Of the arguments alone. `torch.compile`, which traces no NumPy, calls
            it once for equal arguments.
        *arguments: Hashable, and no tensors.
        dtype: That of the tensor.
    """
    tensor = _computed(function, arguments, dtype)
    # Keras asks for the type of tensors, which the compiler knows of results only.
    return tensor.detach() if backend_name() == "torch" else tensor
