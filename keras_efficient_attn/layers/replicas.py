"""Replicas of a model that trains on several devices: sums, losses and numbers."""

import collections
import sys
import weakref

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND

# `{layer: {replica: losses}}`; Keras would track an attribute of a layer.
_LOSSES = weakref.WeakKeyDictionary()


class ReplicaLosses:
    """Mixin for Keras layers: `add_loss` keeps the losses of replicas apart.

    The replicas of `MirroredStrategy` are threads of one model, with one list of losses
    per layer. Where they wait for each other in the forward pass, as for the codes of
    `VQAttention`, the second replica would clear the losses of the first, and both
    would then count later losses of either.
    """

    def add_loss(self, loss):
        super().add_loss(loss)
        index = replica_index()
        if index is not None:
            # There are none if a `StatelessScope` collects losses.
            losses = _LOSSES.setdefault(self, collections.defaultdict(list))
            losses[index] += self._losses
            self._losses.clear()

    def _get_own_losses(self):
        losses = super()._get_own_losses()
        return losses + _LOSSES.get(self, {}).get(replica_index(), [])

    def _clear_losses(self):
        super()._clear_losses()
        _LOSSES.get(self, {}).pop(replica_index(), None)


def sum_over_replicas(x):
    """The sum of each replica's `x`; `x` itself with one replica.

    On JAX, arrays span all devices, so a sum already covers all of them.
    """
    if BACKEND == "tensorflow":
        context = _tensorflow_context()
        return x if context is None else context.all_reduce("SUM", x)
    if BACKEND == "torch" and _torch_processes() > 1:
        import torch.distributed as distributed

        total = x.detach().clone()
        distributed.all_reduce(total)
        return total
    return x


def take_first_replica(x):
    """The `x` of the first replica, on all of them."""
    if BACKEND == "tensorflow":
        context = _tensorflow_context()
        if context is None:
            return x
        first = context.replica_id_in_sync_group == 0
        return sum_over_replicas(ops.where(first, x, ops.zeros_like(x)))
    if BACKEND == "torch" and _torch_processes() > 1:
        import torch.distributed as distributed

        first = x.detach().clone()
        distributed.broadcast(first, 0)
        return first
    return x


def replica_index():
    """The number of the replica that runs; `None` unless threads share the model."""
    if BACKEND != "tensorflow":
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
