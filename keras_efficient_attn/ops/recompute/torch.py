"""`recompute_scan` for PyTorch: a loop over steps that backward runs again."""

import torch
from torch.utils.checkpoint import checkpoint


def recompute_scan(step, carry, xs, consts, step_gradient):
    if not torch.is_grad_enabled() or not any(
        tensor.requires_grad for tensor in (*carry, *xs, *consts)
    ):
        return _loop(step, carry, xs, consts)
    if step_gradient is None:
        return _loop(_checkpointed(step), carry, xs, consts)
    outputs = _Scan.apply(
        step, step_gradient, len(carry), len(xs), *carry, *xs, *consts
    )
    return outputs[: len(carry)], outputs[len(carry) :]


def vector_jacobian_product(function, arguments):
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


def _loop(step, carry, xs, consts):
    ys = []
    # unbind, not indexing: the gradient of x[i] is a zero tensor as large as x.
    for x in zip(*(torch.unbind(tensor) for tensor in xs), strict=True):
        carry, y = step(carry, x, consts)
        ys.append(y)
    return carry, _stacked(ys)


def _stacked(rows):
    return tuple(torch.stack(tensors) for tensors in zip(*rows, strict=True))


def _checkpointed(step):
    def run(carry, x, consts):
        return checkpoint(
            step, carry, x, consts, use_reentrant=False, preserve_rng_state=False
        )

    return run


class _Scan(torch.autograd.Function):
    """The loop with a derivative by hand."""

    @staticmethod
    def forward(ctx, step, step_gradient, carry_size, xs_size, *tensors):
        carry = tensors[:carry_size]
        xs = tensors[carry_size : carry_size + xs_size]
        consts = tensors[carry_size + xs_size :]
        carries = []

        def recorded(carry, x, consts):
            carries.append(carry)
            return step(carry, x, consts)

        carry, ys = _loop(recorded, carry, xs, consts)
        ctx.step_gradient = step_gradient
        ctx.sizes = [len(group) for group in (xs, consts, ys)]
        ctx.save_for_backward(
            *xs, *consts, *ys, *(tensor for carry in carries for tensor in carry)
        )
        return (*(tensor.clone() for tensor in carry), *ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        saved = iter(ctx.saved_tensors)
        xs, consts, ys = (tuple(next(saved) for _ in range(n)) for n in ctx.sizes)
        carry_size = len(upstream) - len(ys)
        of_carry, of_ys = upstream[:carry_size], upstream[carry_size:]
        carries = [
            tuple(next(saved) for _ in range(carry_size)) for _ in range(len(xs[0]))
        ]
        of_consts = tuple(torch.zeros_like(tensor) for tensor in consts)
        of_xs = []
        for i in reversed(range(len(carries))):
            of_carry, of_x, of_const = ctx.step_gradient(
                carries[i],
                tuple(tensor[i] for tensor in xs),
                consts,
                tuple(tensor[i] for tensor in ys),
                of_carry,
                tuple(tensor[i] for tensor in of_ys),
            )
            of_xs.append(of_x)
            of_consts = tuple(a + b for a, b in zip(of_consts, of_const, strict=True))
        return None, None, None, None, *of_carry, *_stacked(of_xs[::-1]), *of_consts
