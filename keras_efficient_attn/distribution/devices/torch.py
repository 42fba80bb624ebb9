"""Sequences over the processes of a group, by `torch.distributed`."""

import torch
import torch.distributed as distributed

from keras_efficient_attn.ops.common.derivatives_torch import (
    refuse_second_derivatives,
)


class Devices:
    """One process of a group.

    Args:
        group: `torch.distributed.ProcessGroup`, or `None` for all processes.

    Raises:
        ValueError: If the process is not in the group.
    """

    def __init__(self, group):
        self.group = group
        self.size = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "`group` must contain this process: make `SequenceParallel` in the "
                "processes of the group only. Received: a group without process "
                f"{distributed.get_rank()}"
            )

    def before(self, x):
        """Booleans `(size,)`, where `x` is: which processes have earlier positions."""
        return torch.arange(self.size, device=x.device) < self.rank

    def all_gather(self, x):
        """`(size, ...)`: the tensors of all processes."""
        return _AllGather.apply(x, self)

    def from_previous(self, x):
        """The tensor of the process before this one; zeros on the first."""
        return _Shift.apply(x, self, 1)

    def from_next(self, x):
        """The tensor of the process after this one; zeros on the last."""
        return _Shift.apply(x, self, -1)

    def shift(self, x, step):
        """The tensor of the process `step` before this one, or zeros."""
        # Processes exchange contiguous memory; `zeros_like` keeps the strides of `x`.
        x = x.contiguous()
        received, operations = torch.zeros_like(x), []
        for peer, send, tensor in (
            (self.rank + step, distributed.isend, x),
            (self.rank - step, distributed.irecv, received),
        ):
            if 0 <= peer < self.size:
                if self.group is not None:
                    peer = distributed.get_global_rank(self.group, peer)
                operations.append(distributed.P2POp(send, tensor, peer, self.group))
        for work in distributed.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received


class Runner:
    """Runs functions on the positions of this process.

    Args:
        device_mesh: `None`.
        axis_name: The default of `SequenceParallel`: a group has one axis.
        group: `torch.distributed.ProcessGroup`, or `None` for all processes.
    """

    def __init__(self, device_mesh, axis_name, group):
        if device_mesh is not None:
            raise ValueError(
                "`device_mesh` is an argument for JAX; on PyTorch pass a `group` of "
                f"processes. Received: device_mesh={device_mesh!r}"
            )
        if axis_name != "sequence":
            raise ValueError(
                "`axis_name` is an argument for JAX; on PyTorch leave it out, because "
                f"a `group` has one axis. Received: axis_name={axis_name!r}"
            )
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ValueError(
                "On PyTorch, call `torch.distributed.init_process_group` before "
                "`SequenceParallel`, in every process. Received: no process group"
            )
        self.devices = Devices(group)
        self.size = self.devices.size
        # Each tensor holds only the positions of this process.
        self.divides_tensors = False

    def run(self, function, split, whole, *static):
        """`function(devices, split, whole, *static)`."""
        return function(self.devices, split, whole, *static)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context, x, devices):
        context.devices = devices
        # As in `shift`.
        x = x.contiguous()
        tensors = [torch.empty_like(x) for _ in range(devices.size)]
        distributed.all_gather(tensors, x, group=devices.group)
        return torch.stack(tensors)

    @staticmethod
    def backward(context, gradient):
        refuse_second_derivatives()
        total = gradient.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=context.devices.group)
        return total[context.devices.rank], None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(context, x, devices, step):
        context.devices, context.step = devices, step
        return devices.shift(x, step)

    @staticmethod
    def backward(context, gradient):
        refuse_second_derivatives()
        return context.devices.shift(gradient, -context.step), None, None
