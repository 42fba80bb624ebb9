"""Copies the state of a backbone to its converted copy."""

import keras
from keras import ops

from keras_efficient_attn.layers.keras_internals import (
    lora_of,
    own_variables,
    projections,
    set_dtype_policy,
    tracked_layers,
)
from keras_efficient_attn.models.conversion.adapters import AttentionAdapter
from keras_efficient_attn.models.keras_hub_internals import (
    copy_lora_state,
)


def copy_weights(source, target):
    """Copies weights, LoRA and trainable flags.

    Args:
        source: A backbone.
        target: A backbone of the same configuration, with adapters instead of some
            attention layers. The weights of their kernels do not change.
    """
    for old, new in _pairs(source, target):
        if isinstance(new.dtype_policy, keras.dtype_policies.DTypePolicyMap):
            # Keras cannot save quantised layers that hold the whole policy map.
            set_dtype_policy(new, old.dtype_policy)
        lora = lora_of(old)
        if lora is not None and lora_of(new) is None:
            rank, alpha = lora
            new.enable_lora(rank, lora_alpha=alpha)
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    for old, new in _pairs(source, target):
        variables = zip(own_variables(old), own_variables(new), strict=True)
        for old_variable, new_variable in variables:
            # On JAX a training step donates the buffers of its weights.
            new_variable.assign(ops.copy(old_variable))
            new_variable.trainable = old_variable.trainable
    copy_lora_state(source, target)


def _pairs(old, new):
    """Pairs of corresponding layers of two models, outermost first."""
    yield old, new
    if isinstance(new, AttentionAdapter):
        children = zip(
            projections(old).values(), projections(new).values(), strict=True
        )
    else:
        children = zip(tracked_layers(old), tracked_layers(new), strict=True)
    for pair in children:
        yield from _pairs(*pair)
