"""`recompute_scan` for PyTorch: a loop over steps that the backward pass reruns."""

import contextlib

import torch
from torch.utils.checkpoint import checkpoint

from keras_efficient_attn.ops.common import private_torch
from keras_efficient_attn.ops.common.derivatives_torch import (
    refuse_second_derivatives,
)


def recompute_scan(
    step,
    carry,
    xs,
    consts=(),
    gradient=None,
    num_steps=None,
    step_size=None,
    reverse=False,
):
    steps = _Rows(len(xs[0]), reverse) if num_steps is None else _Positions(num_steps)
    transform = private_torch.function_transform
    if transform and not torch.compiler.is_compiling() and transform() is not None:
        return _loop_with_autograd(step, carry, xs, consts, steps)
    if not torch.is_grad_enabled() or not any(
        tensor.requires_grad for tensor in (*carry, *xs, *consts)
    ):
        context = contextlib.nullcontext()
        if gradient is not None:
            # As in `_Scan`: the products of the step keep their dtype.
            context = torch.autocast(xs[0].device.type, enabled=False)
        with context:
            return _loop(step, carry, xs, consts, steps)
    if gradient is None:
        return _loop_with_autograd(_checkpoint(step), carry, xs, consts, steps)
    outputs = _Scan.apply(
        step, gradient, steps, len(carry), len(xs), *carry, *xs, *consts
    )
    return outputs[: len(carry)], outputs[len(carry) :]


def vector_jacobian_product(function, arguments):
    if torch.compiler.is_compiling():
        return _traced_product(function, arguments)
    with torch.enable_grad():
        arguments = tuple(
            tuple(tensor.detach().requires_grad_() for tensor in group)
            for group in arguments
        )
        value = function(*arguments)

    def pull(gradient):
        pairs = [
            (v, g)
            for v, g in zip(value, gradient, strict=True)
            if v is not None and g is not None and v.requires_grad
        ]
        flat = [tensor for group in arguments for tensor in group]
        gradients = torch.autograd.grad(
            [v for v, _ in pairs],
            flat,
            [g for _, g in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        gradients = iter(gradients)
        return tuple(tuple(next(gradients) for _ in group) for group in arguments)

    return tuple(None if v is None else v.detach() for v in value), pull


def _traced_product(function, arguments):
    """`vector_jacobian_product` in a form that `torch.compile` can trace.

    In eager mode it does not support a `torch.autograd.Function` inside.
    """
    present = []

    def tensors_alone(*arguments):
        value = function(*arguments)
        present[:] = [v is not None for v in value]
        return tuple(v for v in value if v is not None)

    tensors, pull_all = torch.func.vjp(tensors_alone, *arguments)
    remaining = iter(tensors)
    value = tuple(next(remaining) if there else None for there in present)

    def pull(gradient):
        pairs = zip(value, gradient, strict=True)
        return pull_all(
            tuple(
                torch.zeros_like(v) if g is None else g
                for v, g in pairs
                if v is not None
            )
        )

    return value, pull


class _Rows:
    """Steps that each take a row of the leading axis.

    Attributes:
        number: Of steps.
        order: In which steps run.
        cuts_rows: Whether a step's tensors have an axis less than all of them.
    """

    cuts_rows = True

    def __init__(self, number, reverse=False):
        self.number = number
        self.order = range(number)[:: -1 if reverse else 1]

    def cut(self, tensors):
        """The tensors of each step; there may be no steps."""
        return list(zip(*map(self.split, tensors), strict=True)) or [()] * self.number

    def split(self, tensor):
        # unbind, not indexing: the gradient of x[i] is a zero tensor as large as x.
        return torch.unbind(tensor)

    def join(self, tensors):
        return torch.stack(tensors)

    def space_for(self, tensor):
        """An empty tensor for the outputs of all steps."""
        return tensor.new_empty(self.number, *tensor.shape)


class _Positions(_Rows):
    """Steps that each take an equal number of positions of axis 1."""

    cuts_rows = False

    def split(self, tensor):
        return torch.split(tensor, tensor.shape[1] // self.number, 1)

    def join(self, tensors):
        return torch.cat(tensors, 1)

    def space_for(self, tensor):
        batch, size, *tail = tensor.shape
        return tensor.new_empty(batch, self.number * size, *tail)


class _Outputs:
    """Tensors of each step, written in place, so that large ones are copied once."""

    def __init__(self, steps):
        self._steps = steps
        self.whole = None

    def write(self, i, tensors):
        if self._steps.number == 1 and not self._steps.cuts_rows:
            self.whole = tuple(tensors)
            return
        if self.whole is None:
            self.whole = tuple(map(self._steps.space_for, tensors))
            self._parts = list(map(self._steps.split, self.whole))
        for parts, tensor in zip(self._parts, tensors, strict=True):
            parts[i].copy_(tensor)


def _loop_with_autograd(step, carry, xs, consts, steps):
    """The loop, recorded by PyTorch's autograd."""
    rows, inputs = {}, steps.cut(xs)
    for i in steps.order:
        carry, rows[i] = step(carry, inputs[i], consts)
    in_place = (rows[i] for i in range(steps.number))
    return carry, tuple(map(steps.join, zip(*in_place, strict=True)))


def _loop(step, carry, xs, consts, steps):
    ys, inputs = _Outputs(steps), steps.cut(xs)
    for i in steps.order:
        carry, y = step(carry, inputs[i], consts)
        ys.write(i, y)
    return carry, ys.whole


def _checkpoint(step):
    # Without a seed, dropout of Keras draws from PyTorch's generator, whose state
    # `checkpoint` keeps for the second run.
    def run(carry, x, consts):
        return checkpoint(step, carry, x, consts, use_reentrant=False)

    return run


class _Scan(torch.autograd.Function):
    """The loop with a handwritten derivative."""

    @staticmethod
    def forward(ctx, step, step_gradient, steps, carry_size, xs_size, *tensors):
        carry = tensors[:carry_size]
        xs = tensors[carry_size : carry_size + xs_size]
        consts = tensors[carry_size + xs_size :]
        carries, ys, inputs = [], _Outputs(steps), steps.cut(xs)
        with torch.autocast(xs[0].device.type, enabled=False):
            for i in steps.order:
                carries.append(carry)
                carry, y = step(carry, inputs[i], consts)
                ys.write(i, y)
        ys = ys.whole
        ctx.step_gradient, ctx.steps = step_gradient, steps
        ctx.sizes = [len(group) for group in (xs, consts, ys)]
        ctx.save_for_backward(
            *xs, *consts, *ys, *(tensor for carry in carries for tensor in carry)
        )
        return (*(tensor.clone() for tensor in carry), *ys)

    @staticmethod
    def backward(ctx, *upstream):
        refuse_second_derivatives()
        saved = iter(ctx.saved_tensors)
        xs, consts, ys = (tuple(next(saved) for _ in range(n)) for n in ctx.sizes)
        carry_size = len(upstream) - len(ys)
        grad_carry, grad_ys = upstream[:carry_size], upstream[carry_size:]
        inputs = [ctx.steps.cut(tensors) for tensors in (xs, ys, grad_ys)]
        carries = [tuple(next(saved) for _ in range(carry_size)) for _ in inputs[0]]
        grad_consts = tuple(torch.zeros_like(tensor) for tensor in consts)
        grad_xs = _Outputs(ctx.steps)
        for i in reversed(ctx.steps.order):
            x, y, grad_y = (tensors[i] for tensors in inputs)
            with torch.autocast(xs[0].device.type, enabled=False):
                grad_carry, grad_x, grad_const = ctx.step_gradient(
                    carries.pop(), x, consts, y, grad_carry, grad_y
                )
            grad_xs.write(i, grad_x)
            grad_consts = tuple(
                a + b for a, b in zip(grad_consts, grad_const, strict=True)
            )
        return None, None, None, None, None, *grad_carry, *grad_xs.whole, *grad_consts
