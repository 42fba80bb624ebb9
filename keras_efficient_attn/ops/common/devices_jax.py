"""Kernels on the devices of `keras.distribution`, each for its rows and heads."""

import functools
import math

import jax
import keras
from jax.sharding import PartitionSpec


def run_on_devices(function, batch, heads, inputs):
    """`function(batch, heads, inputs)`, of which each device computes its own part.

    XLA cannot divide a kernel between devices. Under a `keras.distribution`, a device
    gets the rows that it has along the mesh's axis for batches, and the heads that it
    has along all other axes. If an axis of the mesh does not divide them, its devices
    compute the same.

    Args:
        function: Returns a tree of arrays `(batch, heads, ...)`, of the sizes that it
            is called with.
        batch, heads: Sizes.
        inputs: Tree of arrays `(batch, heads or 1, ...)`, or of two axes: every device
            gets the latter in full.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return function(batch, heads, inputs)
    mesh = distribution.device_mesh.backend_mesh
    # The axes over which the caller already runs device by device.
    context = jax.sharding.get_abstract_mesh()
    free = [name for name in mesh.axis_names if name not in context.manual_axes]
    if not free:
        return function(batch, heads, inputs)
    of_batches = distribution.batch_dim_name
    rows = _dividing(mesh, [name for name in free if name == of_batches], batch)
    others = _dividing(mesh, [name for name in free if name != of_batches], heads)

    def spec(x):
        if x.ndim == 2:
            return PartitionSpec()
        return PartitionSpec(rows, others if x.shape[1] == heads else None)

    return jax.shard_map(
        functools.partial(
            function, batch // _size(mesh, rows), heads // _size(mesh, others)
        ),
        mesh=context if context.manual_axes else mesh,
        axis_names=set(free),
        in_specs=(jax.tree.map(spec, inputs),),
        out_specs=PartitionSpec(rows, others),
        # Pallas does not say over which axes its results differ.
        check_vma=False,
    )(inputs)


def _dividing(mesh, names, size):
    """The axes of a mesh, in order, that divide a size together, as a tuple."""
    chosen = ()
    for name in names:
        if size % _size(mesh, (*chosen, name)) == 0:
            chosen += (name,)
    return chosen


def _size(mesh, names):
    return math.prod(mesh.shape[name] for name in names)
