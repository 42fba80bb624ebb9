"""Losses of layers that replicas share."""

import collections
import weakref

from keras_efficient_attn.ops.common.replicas import replica_index

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
