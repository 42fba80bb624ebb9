"""Handwritten derivatives on PyTorch are first derivatives only."""

import torch


def first_derivatives_only(*tensors):
    """Refuses second derivatives of tensors, which another library computed.

    Args:
        *tensors: Tensors, or `None`.
    """
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(_refuse)


def _refuse(grad):
    refuse_second_derivatives()


def refuse_second_derivatives():
    """Call it first in a handwritten `backward`.

    `torch.autograd.function.once_differentiable` does not see every second derivative:
    its error is at a node without inputs, which `torch.autograd.grad` does not visit.
    It leaves the term out instead.

    Raises:
        NotImplementedError: If PyTorch records the backward pass.
    """
    # `torch.compile` traces the backward pass, and raises an error of its own.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "Second derivatives through this layer are not implemented on PyTorch; "
            "JAX has them. Do not set `create_graph=True` here."
        )
