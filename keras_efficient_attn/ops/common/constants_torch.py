"""NumPy arrays in programs of `torch.compile`."""

import torch


def traced_constant(function, *arguments):
    """Computes `torch.from_numpy(function(*arguments))`."""
    numbers, shape, dtype = _compute(function, arguments)
    return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)


# Such a function could return only one tensor.
@torch.compiler.assume_constant_result
def _compute(function, arguments):
    array = function(*arguments)
    return tuple(array.ravel().tolist()), array.shape, array.dtype.name
