"""`recompute_scan` for JAX: `lax.scan` over a checkpointed step."""

import functools

import jax


def recompute_scan(step, carry, xs, consts, _):
    return _scan(step, carry, xs, consts)


def vector_jacobian_product(function, arguments):
    value, pull = jax.vjp(function, *arguments)
    return value, pull


@functools.partial(jax.jit, static_argnums=0)
def _scan(step, carry, xs, consts):
    # Inside scan the loop body is a computation of its own, so the barrier that
    # keeps XLA from merging forward and recomputed step is not needed.
    step = jax.checkpoint(step, prevent_cse=False)
    return jax.lax.scan(lambda carry, x: step(carry, x, consts), carry, xs)
