"""The two passes through a reversible chain, the same on every backend."""

import collections
import math

import keras
from keras import ops

from keras_efficient_attn.ops.common.scan import vector_jacobian_product
from keras_efficient_attn.ops.reversible.remembered import record_values, replay_values

Before = collections.namedtuple("Before", ["states", "remembered", "num_losses"])
Before.__doc__ = """A half's needs for its second run, and how many losses it has."""


def forward(halves, x1, x2, parameters, states, tensors, apart):
    """Runs the halves.

    Args:
        halves, x1, x2, parameters, states, tensors: As for `reversible_chain`.
        apart: Callable `(function, arguments, like)` that calls the function so that a
            compiler does not interleave it with other computations. `like` has the
            shapes of the results, or is `None`.

    Returns:
        `(outputs, before)`: `outputs` is `(streams, losses, updates)`, with the losses
        of all halves in a list, and `before` has a `Before` for each half.
    """
    streams, states = [x1, x2], list(states)
    losses, updated, before = [], set(), []
    for i, half in enumerate(halves):

        def run(x, own, own_states, tensors, half=half):
            with record_values() as values:
                y, updates, losses = half.function(x, own, own_states, tensors)
            return y, updates, losses, tuple(values)

        own = tuple(parameters[j] for j in half.parameters)
        own_states = tuple(states[j] for j in half.states)
        y, updates, half_losses, values = apart(
            run, (streams[1 - i % 2], own, own_states, tensors), None
        )
        streams[i % 2] = streams[i % 2] + y
        losses += half_losses
        before.append(Before(own_states, values, len(half_losses)))
        for position, value in updates.items():
            index = half.states[position]
            states[index] = value
            updated.add(index)
    updates = {index: states[index] for index in sorted(updated)}
    return (streams, losses, updates), before


def backward(
    halves, streams, gradients, loss_gradients, before, parameters, tensors, apart
):
    """Undoes the halves, last to first.

    Args:
        halves, before, parameters, tensors, apart: As in the forward pass. Without
            `apart`, a compiler could rebuild all halves early or compute all weight
            gradients late, and keep the tensors in between.
        streams: The last streams.
        gradients: The gradients of `streams`.
        loss_gradients: The gradients of all losses.

    Returns:
        `(gradients, parameter_gradients, tensor_gradients)`, the last two are lists
        with `None` for no gradient.
    """
    streams, gradients = list(streams), list(gradients)
    loss_gradients = list(loss_gradients)
    grad_parameters, grad_tensors = [None] * len(parameters), [None] * len(tensors)
    floating = [i for i, tensor in enumerate(tensors) if is_floating(tensor)]
    for i in reversed(range(len(halves))):
        half, (own_states, values, num_losses) = halves[i], before[i]
        target, source = i % 2, 1 - i % 2
        start = len(loss_gradients) - num_losses
        grad_losses, loss_gradients = loss_gradients[start:], loss_gradients[:start]

        def undo(x, own, chosen, own_states, values, gradient, grad_losses, half=half):
            def function(x, own, chosen):
                every = list(tensors)
                for index, tensor in zip(floating, chosen, strict=True):
                    every[index] = tensor
                with replay_values(values):
                    y, _, losses = half.function(x[0], own, own_states, tuple(every))
                return (y, *losses)

            (y, *_), pull = vector_jacobian_product(function, ((x,), own, chosen))
            (grad_x,), grad_own, grad_chosen = pull((gradient, *grad_losses))
            return y, grad_own, grad_chosen, grad_x

        own = tuple(parameters[j] for j in half.parameters)
        chosen = tuple(tensors[j] for j in floating)
        y, grad_own, grad_chosen, grad_x = apart(
            undo,
            (
                streams[source],
                own,
                chosen,
                own_states,
                values,
                gradients[target],
                tuple(grad_losses),
            ),
            (streams[source], own, chosen, streams[source]),
        )
        streams[target] = streams[target] - y
        gradients[source] = gradients[source] + grad_x
        _add(grad_parameters, half.parameters, grad_own)
        _add(grad_tensors, floating, grad_chosen)
    return gradients, grad_parameters, grad_tensors


def is_floating(tensor):
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def never(x):
    """False, in a form that no compiler can evaluate without `x`."""
    total = ops.sum(x)
    return ops.logical_and(total == math.inf, total == -math.inf)


def _add(totals, indices, parts):
    for index, part in zip(indices, parts, strict=True):
        known = totals[index]
        totals[index] = part if known is None else known + part
