"""`reversible_chain` for JAX."""

import jax
from jax import numpy as jnp

from keras_efficient_attn.ops.reversible.passes import Before, backward, forward, never


def reversible_chain(halves, *arguments):
    # The number of losses per half is not a tensor, so it cannot be a residual.
    num_losses = []

    def forward_pass(x1, x2, parameters, states, tensors):
        outputs, before = forward(halves, x1, x2, parameters, states, tensors, _branch)
        num_losses[:] = [half.num_losses for half in before]
        kept = [half[:2] for half in before]
        (y1, y2), losses, updates = outputs
        outputs = y1, y2, tuple(losses), updates
        return outputs, ((y1, y2), kept, parameters, tensors)

    def backward_pass(residuals, gradients):
        grad_x1, grad_x2, grad_losses, _ = gradients
        streams, kept, parameters, tensors = residuals
        before = [Before(*half, n) for half, n in zip(kept, num_losses, strict=True)]
        (grad_x1, grad_x2), grad_parameters, grad_tensors = backward(
            halves,
            streams,
            (grad_x1, grad_x2),
            grad_losses,
            before,
            parameters,
            tensors,
            _after_gradients,
        )
        # States have no gradient.
        return grad_x1, grad_x2, tuple(grad_parameters), None, tuple(grad_tensors)

    @jax.custom_vjp
    def chain(*arguments):
        return forward_pass(*arguments)[0]

    chain.defvjp(forward_pass, backward_pass)
    return chain(*arguments)


def _after_gradients(function, arguments, like):
    return _branch(function, jax.lax.optimization_barrier(arguments), like)


def _branch(function, arguments, like):
    """`function(*arguments)`, on a CPU as a branch of a conditional.

    On CPUs XLA drops barriers and schedules operations without dependencies first, such
    as the initial zeros of all halves' loops and scatters. A branch is scheduled
    separately.
    """
    x = arguments[0]
    if jax.default_backend() != "cpu" or not isinstance(x, jax.core.Tracer):
        return function(*arguments)
    if like is None:
        like = jax.eval_shape(function, *arguments)

    def zeros(*_):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    return jax.lax.cond(never(x), zeros, function, *arguments)
