"""Sums over the replicas of a model that is trained on several devices."""

import sys

from keras import ops

from keras_efficient_attn.ops.common.backend import backend_name


def sum_over_replicas(x):
    """The sum of each replica's `x`; `x` itself with one replica.

    On JAX, arrays span all devices, so a sum already covers all of them.
    """
    if backend_name() == "tensorflow":
        context = _tensorflow_context()
        return x if context is None else context.all_reduce("SUM", x)
    if backend_name() == "torch" and _torch_processes() > 1:
        import torch.distributed as distributed

        total = x.detach().clone()
        distributed.all_reduce(total)
        return total
    return x


def take_first_replica(x):
    """The `x` of the first replica, on all of them."""
    if backend_name() == "tensorflow":
        context = _tensorflow_context()
        if context is None:
            return x
        first = context.replica_id_in_sync_group == 0
        return sum_over_replicas(ops.where(first, x, ops.zeros_like(x)))
    if backend_name() == "torch" and _torch_processes() > 1:
        import torch.distributed as distributed

        first = x.detach().clone()
        distributed.broadcast(first, 0)
        return first
    return x


def replica_index():
    """The number of the replica that runs; `None` unless threads share the model."""
    if backend_name() != "tensorflow":
        return None
    context = _tensorflow_context()
    if context is None:
        return None
    import tensorflow as tf

    # `None` also on TPUs: one program for all replicas, where no number is known.
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)


def _tensorflow_context():
    """The context of one of several replicas, or `None`."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    several = context is not None and context.num_replicas_in_sync > 1
    return context if several else None


def _torch_processes():
    """Number of processes that train together; 1 without a process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return 1
    return distributed.get_world_size() if distributed.is_initialized() else 1
