"""Tensors of numbers that NumPy computes from sizes and settings."""

from keras import ops

from keras_efficient_attn.ops.common.backend import is_traced_by_torch


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
        from keras_efficient_attn.ops.common.constants_torch import traced_constant

        return ops.convert_to_tensor(traced_constant(function, *arguments), dtype)
    return ops.convert_to_tensor(function(*arguments), dtype)
