"""`exponentials` for PyTorch: in place, with derivatives from the results.

PyTorch's autograd would keep, and pass over, a tensor for each operation.
`torch.compile` makes one kernel of the operations itself.
"""

import torch

from keras_efficient_attn.ops.linear_attention import exponentials
from keras_efficient_attn.ops.linear_attention.exponentials import FEATURE_FLOOR


def elu_plus_one(x):
    if torch.compiler.is_compiling():
        return exponentials.elu_plus_one(x)
    return _EluPlusOne.apply(x)


def relative_exponential(x, largest):
    if torch.compiler.is_compiling():
        return exponentials.relative_exponential(x, largest)
    return _RelativeExponential.apply(x, largest)


class _FromResult(torch.autograd.Function):
    """A function whose derivative is read off its result."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)


class _EluPlusOne(_FromResult):
    @staticmethod
    def forward(x):
        return x.clamp(max=0.0).exp_().add_(x.clamp(min=0.0))

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y.clamp(max=1.0)


class _RelativeExponential(_FromResult):
    @staticmethod
    def forward(x, largest):
        return (x - largest).exp_().add_(FEATURE_FLOOR)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        # The floor is below the rounding of the largest feature, 1.
        return gradient * y, None
