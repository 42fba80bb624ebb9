"""`reversible_chain` for PyTorch."""

import torch

from keras_efficient_attn.ops.reversible.passes import Before, backward, forward


def reversible_chain(halves, x1, x2, parameters, states, tensors):
    states = tuple(state.detach() for state in states)
    call = {"halves": halves, "states": states, "parameters": len(parameters)}
    outputs = _Chain.apply(call, x1, x2, *parameters, *tensors)
    count = call["losses"]
    updates = dict(zip(call["updated"], outputs[2 + count :], strict=True))
    return *outputs[:2], tuple(outputs[2 : 2 + count]), updates


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x1, x2, *arguments):
        parameters = arguments[: call["parameters"]]
        tensors = arguments[call["parameters"] :]
        states = call.pop("states")
        (streams, losses, updates), before = forward(
            call["halves"], x1, x2, parameters, states, tensors, _apart
        )
        call.update(losses=len(losses), updated=list(updates))
        # Variables change in place.
        old = {id(states[index]): states[index].clone() for index in updates}
        kept = [[old.get(id(state), state) for state in half.states] for half in before]
        remembered = [half.remembered for half in before]
        ctx.call = call
        ctx.sizes = [
            (len(first), len(second), half.num_losses)
            for first, second, half in zip(kept, remembered, before, strict=True)
        ]
        ctx.mark_non_differentiable(*updates.values())
        ctx.save_for_backward(
            *streams, *arguments, *sum(kept, []), *sum(remembered, ())
        )
        return (*streams, *losses, *updates.values())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_x1, grad_x2, *others):
        saved = iter(ctx.saved_tensors)

        def following(count):
            return tuple(next(saved) for _ in range(count))

        streams = following(2)
        parameters = following(ctx.call["parameters"])
        count = sum(first + second for first, second, _ in ctx.sizes)
        tensors = following(len(ctx.saved_tensors) - 2 - len(parameters) - count)
        states = [following(first) for first, _, _ in ctx.sizes]
        before = [
            Before(own, following(second), num_losses)
            for own, (_, second, num_losses) in zip(states, ctx.sizes, strict=True)
        ]
        grad_streams, grad_parameters, grad_tensors = backward(
            ctx.call["halves"],
            streams,
            (grad_x1, grad_x2),
            others[: ctx.call["losses"]],
            before,
            parameters,
            tensors,
            _apart,
        )
        return None, *grad_streams, *grad_parameters, *grad_tensors


def _apart(function, arguments, _):
    return function(*arguments)
