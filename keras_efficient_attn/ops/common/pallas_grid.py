"""Pallas kernels that run over the blocks of sequences.

The grid is (batch, heads, blocks). Each operand is one of

- positions: `(batch, heads, length, dim)`, or one head for all. In this layout XLA's
  projections write and read them without a copy. `(batch, length, heads * dim)` needs a
  copy, because a TPU's tiles differ with heads as an axis;
- a row for each head, or one for all heads: `(batch, heads or 1, 1, length)`;
- a matrix for each head, `(batch, heads, n, m)`, or for all, `(n, m)`, which every
  program reads whole;
- matrices of each head, one after the other: `(batch, heads, matrices, n, m)`.

On other devices Pallas interprets the kernels: the same results, slowly, for tests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.common.devices_jax import run_on_devices


def call(plan, kernel, inputs, outputs, specs, scratch=None):
    """The outputs of a kernel for all blocks of all heads.

    Args:
        plan: A dataclass, has the grid's `batch`, `heads` and `blocks`.
        kernel: Called with a device's `plan`, the references of `inputs` and of
            `outputs` and, by name, of `scratch`.
        inputs: Tree of arrays.
        outputs: Dict of arrays, or shapes, like the outputs.
        specs: The blocks of the inputs and of the outputs, in the same structures.
        scratch: Dict, or `None`.
    """

    def run(batch, heads, inputs):
        own = dataclasses.replace(plan, batch=batch, heads=heads)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batch, heads, *x.shape[2:]), x.dtype),
            outputs,
        )

        def body(inputs, outputs, **scratch):
            kernel(own, inputs, outputs, **scratch)

        def call_kernel(interpret, inputs):
            return pl.pallas_call(
                body,
                out_shape=shapes,
                grid=(batch, heads, plan.blocks),
                in_specs=(specs[0],),
                out_specs=specs[1],
                scratch_shapes=scratch or {},
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary")
                ),
                interpret=interpret,
                name=kernel.__name__,
            )(inputs)

        return lax.platform_dependent(
            inputs,
            tpu=functools.partial(call_kernel, False),
            default=functools.partial(call_kernel, True),
        )

    return run_on_devices(run, plan.batch, plan.heads, inputs)


def positions(x, block, at):
    """The block `(block, dim)` of positions, number `at(i)` in program `i`."""
    size = None, None, block, x.shape[3]
    if x.shape[1] == 1:
        return pl.BlockSpec(size, lambda b, h, i: (b, 0, at(i), 0))
    return pl.BlockSpec(size, lambda b, h, i: (b, h, at(i), 0))


def row(x, block, at):
    """The block `(1, block)` of a row, number `at(i)` in program `i`."""
    size = None, None, 1, block
    if x.shape[1] == 1:
        return pl.BlockSpec(size, lambda b, h, i: (b, 0, 0, at(i)))
    return pl.BlockSpec(size, lambda b, h, i: (b, h, 0, at(i)))


def matrices(x, count, at):
    """The block of `count` matrices, number `at(i)` in program `i`."""
    size = None, None, count, *x.shape[3:]
    return pl.BlockSpec(size, lambda b, h, i: (b, h, at(i), 0, 0))


def whole(x):
    """A matrix."""
    if len(x.shape) == 2:
        return pl.BlockSpec(x.shape, lambda b, h, i: (0, 0))
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, i: (b, h, 0, 0))


def to_row(x):
    """`(batch, length)` or `(batch, length, heads)` as rows, in float32."""
    x = x.astype(jnp.float32)
    return x[:, None, None] if x.ndim == 2 else jnp.swapaxes(x, 1, 2)[:, :, None]


def dot(a, b, contract=(1, 0)):
    """A product of matrices that contracts one axis of each, in float32."""
    dims = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
