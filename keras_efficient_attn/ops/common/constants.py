"""Tensors of numbers that NumPy computes from sizes and settings."""

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, is_traced_by_torch

if BACKEND == "torch":
    import torch

    # Such a function could return only one tensor.
    @torch.compiler.assume_constant_result
    def _compute(function, arguments):
        array = function(*arguments)
        return tuple(array.ravel().tolist()), array.shape, array.dtype.name


def constant(function, *arguments, dtype):
    """`function(*arguments)`, an array, as a tensor.

    Args:
        function: Function of the arguments alone. `torch.compile` does not trace NumPy
            and stores the array in its program, so it should hold thousands of numbers,
            not millions.
        *arguments: Hashable arguments, not tensors.
        dtype: Dtype of the tensor.
    """
    if is_traced_by_torch():
        numbers, shape, name = _compute(function, arguments)
        array = torch.tensor(numbers, dtype=getattr(torch, name)).reshape(shape)
    else:
        array = function(*arguments)
    return ops.convert_to_tensor(array, dtype)
