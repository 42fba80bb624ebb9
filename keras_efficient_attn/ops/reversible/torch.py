"""`reversible_chain` for PyTorch.

Without a seed, Keras' dropout draws from PyTorch's generator. The generator's state
before each half is stored for the second run, and so are the settings of autocast.
"""

import contextlib

import torch

from keras_efficient_attn.ops.common.backend import in_function_transform
from keras_efficient_attn.ops.common.derivatives_torch import (
    refuse_second_derivatives,
)
from keras_efficient_attn.ops.reversible.passes import Before, backward, forward


def reversible_chain(halves, x1, x2, parameters, states, tensors):
    states = tuple(state.detach() for state in states)
    if in_function_transform():
        arguments = halves, x1, x2, parameters, states, tensors
        (streams, losses, updates), _ = forward(*arguments, _call)
        return *streams, tuple(losses), updates
    call = {"halves": halves, "states": states, "parameters": len(parameters)}
    outputs = _Chain.apply(call, x1, x2, *parameters, *tensors)
    count = call["losses"]
    updates = dict(zip(call["updated"], outputs[2 + count :], strict=True))
    return *outputs[:2], tuple(outputs[2 : 2 + count]), updates


def _call(function, arguments, _):
    return function(*arguments)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x1, x2, *arguments):
        parameters = arguments[: call["parameters"]]
        tensors = arguments[call["parameters"] :]
        states = call.pop("states")
        devices = [x1.device] if x1.is_cuda else []
        generators = []

        def run(function, arguments, _):
            generators.append(_generator_states(devices))
            return function(*arguments)

        (streams, losses, updates), before = forward(
            call["halves"], x1, x2, parameters, states, tensors, run
        )
        ctx.devices, ctx.generators = devices, generators
        ctx.autocast = _autocast_settings(x1.device.type)
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
    def backward(ctx, grad_x1, grad_x2, *others):
        refuse_second_derivatives()
        saved = iter(ctx.saved_tensors)

        def take(count):
            return tuple(next(saved) for _ in range(count))

        streams = take(2)
        parameters = take(ctx.call["parameters"])
        count = sum(first + second for first, second, _ in ctx.sizes)
        tensors = take(len(ctx.saved_tensors) - 2 - len(parameters) - count)
        states = [take(first) for first, _, _ in ctx.sizes]
        before = [
            Before(own, take(second), num_losses)
            for own, (_, second, num_losses) in zip(states, ctx.sizes, strict=True)
        ]
        generators = reversed(ctx.generators)

        def run(function, arguments, _):
            with torch.random.fork_rng(ctx.devices), _autocast(ctx.autocast):
                _restore(next(generators), ctx.devices)
                return function(*arguments)

        grad_streams, grad_parameters, grad_tensors = backward(
            ctx.call["halves"],
            streams,
            (grad_x1, grad_x2),
            others[: ctx.call["losses"]],
            before,
            parameters,
            tensors,
            run,
        )
        return None, *grad_streams, *grad_parameters, *grad_tensors


def _autocast_settings(device_type):
    """The arguments of `torch.autocast` with which the caller computes.

    `None` for devices without it.
    """
    if not torch.amp.is_autocast_available(device_type):
        return None
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
    }


def _autocast(settings):
    return contextlib.nullcontext() if settings is None else torch.autocast(**settings)


def _generator_states(devices):
    on_devices = [torch.cuda.get_rng_state(device) for device in devices]
    return torch.get_rng_state(), on_devices


def _restore(states, devices):
    state, on_devices = states
    torch.set_rng_state(state)
    for device, state in zip(devices, on_devices, strict=True):
        torch.cuda.set_rng_state(state, device)
