"""Sequences over an axis of a mesh, by `jax.shard_map`."""

import functools

import jax
import keras
from keras import ops


class Devices:
    """One device of an axis, as a function inside of `jax.shard_map` sees it.

    Args:
        axis: Name of the axis.
        size: Devices along it.
    """

    def __init__(self, axis, size):
        self.axis = axis
        self.size = size

    def before(self, x):
        """Booleans `(size,)`, where `x` is: which devices have earlier positions."""
        return ops.arange(self.size) < jax.lax.axis_index(self.axis)

    def all_gather(self, x):
        """`(size, ...)`: the tensors of all devices."""
        return jax.lax.all_gather(x, self.axis)

    def from_previous(self, x):
        """The tensor of the device with the preceding positions; zeros on the first."""
        return self._shift(x, 1)

    def from_next(self, x):
        """The tensor of the device with the following positions; zeros on the last."""
        return self._shift(x, -1)

    def _shift(self, x, step):
        ends = range(self.size - 1)
        pairs = [(i, i + 1) if step > 0 else (i + 1, i) for i in ends]
        return jax.lax.ppermute(x, self.axis, pairs)


class Runner:
    """Runs functions on the parts of tensors that are split over an axis.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`; `None` for the current
            distribution's mesh.
        axis_name: Name of its axis.
        group: `None`.
    """

    def __init__(self, device_mesh, axis_name, group):
        if group is not None:
            raise ValueError(
                "`group` is an argument for PyTorch; on JAX pass a `device_mesh`. "
                f"Received: group={group!r}"
            )
        if device_mesh is None:
            distribution = keras.distribution.distribution()
            device_mesh = getattr(distribution, "device_mesh", None)
        if not isinstance(device_mesh, keras.distribution.DeviceMesh):
            raise TypeError(
                "`device_mesh` must be a `keras.distribution.DeviceMesh`, or None "
                "where a distribution is set that has one. Received: "
                f"device_mesh={device_mesh!r}"
            )
        if axis_name not in device_mesh.axis_names:
            raise ValueError(
                "`axis_name` must be an axis of `device_mesh`, one of "
                f"{list(device_mesh.axis_names)}. Received: axis_name={axis_name!r}"
            )
        self.mesh = device_mesh.backend_mesh
        self.axis = axis_name
        self.size = self.mesh.shape[axis_name]
        # Tensors are whole: each device slices its part.
        self.divides_tensors = True

    def run(self, function, split, whole, *static):
        """`function(devices, split, whole, *static)` on each device.

        Args:
            function: Function. Pass the same object again to reuse the compiled
                program.
            split: Nest of tensors `(batch, length, ...)`.
            whole: Nest of tensors that every device has in full.
            *static: Hashable.

        Returns:
            A tensor, `(batch, length, ...)`.
        """
        return _program(self.mesh, self.axis, function, static)(split, whole)


# Bounded: static arguments may hold users' functions.
@functools.lru_cache(256)
def _program(mesh, axis, function, static):
    devices = Devices(axis, mesh.shape[axis])
    spec = jax.sharding.PartitionSpec

    def on_device(split, whole):
        return function(devices, split, whole, *static)

    # The compiler handles the other axes: it splits batches and heads over them.
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(spec(None, axis), spec()),
        out_specs=spec(None, axis),
        axis_names={axis},
        check_vma=False,
    )
    return jax.jit(mapped)
