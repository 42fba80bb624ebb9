"""`recompute_scan` for JAX: loops of `lax.scan`, with a handwritten backward loop.

`lax.scan` handles rows of a leading axis, and JAX differentiates it. Positions of axis
1 are sliced inside the loop, because moving the axis would make XLA copy all tensors.
JAX's own gradient of such slices adds up whole tensors in each step, so the backward
loop is written by hand.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(
    jax.jit, static_argnames=("step", "gradient", "num_steps", "step_size", "reverse")
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
    if num_steps is None:
        # Inside scan the loop body is a separate computation, so no barrier is needed
        # to keep XLA from merging the forward and the recomputed step.
        step = jax.checkpoint(step, prevent_cse=False)
        return lax.scan(
            lambda carry, x: step(carry, x, consts), carry, xs, reverse=reverse
        )
    if not isinstance(num_steps, int):
        # With a symbolic length (export), only the row-wise scan works.
        xs = tuple(_as_rows(x, num_steps, step_size) for x in xs)
        carry, ys = recompute_scan(step, carry, xs, consts)
        return carry, tuple(map(_from_rows, ys))
    if num_steps == 1 and gradient is None:
        return jax.checkpoint(step)(carry, xs, consts)
    return _differentiable(step, gradient, num_steps, carry, xs, consts)


def vector_jacobian_product(function, arguments):
    value, pull_all = jax.vjp(function, *arguments)

    def pull(gradient):
        zeros = jax.tree.map(jnp.zeros_like, value)
        pairs = zip(gradient, zeros, strict=True)
        return pull_all(tuple(zero if g is None else g for g, zero in pairs))

    return value, pull


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(step, gradient, num_steps, carry, xs, consts):
    return _loop(step, num_steps, carry, xs, consts)[0]


def _loop(step, num_steps, carry, xs, consts):
    """The results of the scan, and the carry before each step."""
    if num_steps == 1:
        # Without slices, which XLA does not split over devices.
        return step(carry, xs, consts), carry

    def body(state, i):
        carry, ys = state
        new_carry, y = step(carry, _cut(xs, i, num_steps), consts)
        return (new_carry, _write(ys, i, y)), carry

    _, shapes = jax.eval_shape(step, carry, _cut(xs, 0, num_steps), consts)
    ys = tuple(
        jnp.zeros((y.shape[0], num_steps * y.shape[1], *y.shape[2:]), y.dtype)
        for y in shapes
    )
    return lax.scan(body, (carry, ys), jnp.arange(num_steps))


def _forward(step, gradient, num_steps, carry, xs, consts):
    outputs, carries = _loop(step, num_steps, carry, xs, consts)
    ys = None if gradient is None else outputs[1]
    return outputs, (carries, xs, consts, ys)


def _backward(step, gradient, num_steps, kept, upstream):
    carries, xs, consts, ys = kept
    grad_carry, grad_ys = upstream
    # Integers have no gradients; JAX makes the zeros, of unknown sizes too (export).
    zeros = [(None,) * len(group) for group in (xs, consts)]
    if num_steps == 1:
        # `recompute_scan` leaves a single step without a gradient to JAX.
        grads = gradient(carries, xs, consts, ys, grad_carry, grad_ys)
        own = (
            _of_real(grad, x) for grad, x in zip(grads[1:], (xs, consts), strict=True)
        )
        grad_xs, grad_consts = map(_with_others, own, (xs, consts), zeros)
        return grads[0], grad_xs, grad_consts

    def pull_step(carry, i, x, grad_carry):
        grad_y = _cut(grad_ys, i, num_steps)
        if gradient is None:
            _, pull = jax.vjp(step, carry, x, consts)
            return pull((grad_carry, grad_y))
        return gradient(carry, x, consts, _cut(ys, i, num_steps), grad_carry, grad_y)

    real_xs = tuple(filter(_real, xs))

    def body(state, inputs):
        grad_carry, grad_consts, buffers, last_grad_x = state
        i, carry = inputs
        buffers = _write(buffers, jnp.minimum(i + 1, num_steps - 1), last_grad_x)
        x = _cut(_with_others(buffers, xs, xs), i, num_steps)
        grad_carry, grad_x, grad_const = pull_step(carry, i, x, grad_carry)
        grad_consts = tuple(map(jnp.add, grad_consts, _of_real(grad_const, consts)))
        return (grad_carry, grad_consts, buffers, _of_real(grad_x, xs)), None

    grad_consts = tuple(map(jnp.zeros_like, filter(_real, consts)))
    # Gradients replace the parts of `xs` that were read. A step writes those of the
    # step before it first: all that it reads then is behind what it writes, and XLA
    # copies no buffer.
    state = grad_carry, grad_consts, real_xs, _cut(real_xs, num_steps - 1, num_steps)
    inputs = jnp.arange(num_steps), carries
    state, _ = lax.scan(body, state, inputs, reverse=True)
    grad_carry, grad_consts, buffers, grad_x = state
    grad_xs = _with_others(_write(buffers, 0, grad_x), xs, zeros[0])
    return grad_carry, grad_xs, _with_others(grad_consts, consts, zeros[1])


_differentiable.defvjp(_forward, _backward)


def _real(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def _of_real(gradients, tensors):
    """The gradients of those tensors that are not integers."""
    pairs = zip(gradients, tensors, strict=True)
    return tuple(gradient for gradient, x in pairs if _real(x))


def _with_others(given, tensors, others):
    """One entry for each tensor: those given, in order; of others for integers."""
    given = iter(given)
    pairs = zip(tensors, others, strict=True)
    return tuple(next(given) if _real(x) else other for x, other in pairs)


def _as_rows(x, num_steps, size):
    batch, _, *tail = x.shape
    return jnp.moveaxis(x.reshape(batch, num_steps, size, *tail), 1, 0)


def _from_rows(y):
    num_steps, batch, size, *tail = y.shape
    return jnp.moveaxis(y, 0, 1).reshape(batch, num_steps * size, *tail)


def _cut(tensors, i, num_steps):
    sizes = [x.shape[1] // num_steps for x in tensors]
    return tuple(
        lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
        for x, size in zip(tensors, sizes, strict=True)
    )


def _write(tensors, i, parts):
    return tuple(
        lax.dynamic_update_slice_in_dim(x, part, i * part.shape[1], axis=1)
        for x, part in zip(tensors, parts, strict=True)
    )
