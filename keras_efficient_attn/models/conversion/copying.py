"""Copying the state of a backbone to its converted copy."""

import keras
from keras import ops

from keras_efficient_attn.models.conversion.stand_ins import StandIn, kept_layers


def copy_weights(source, target):
    """Copies weights, LoRA and what is trainable.

    Args:
        source: A backbone.
        target: One of the same configuration, some of whose attention layers are
            stand-ins; their own weights stay as they are.
    """
    for old, new in _pairs(source, target):
        if isinstance(new.dtype_policy, keras.dtype_policies.DTypePolicyMap):
            # Keras cannot save quantised layers that have the whole map.
            new._dtype_policy = old.dtype_policy
        if getattr(old, "lora_enabled", False) and not new.lora_enabled:
            new.enable_lora(old.lora_rank, lora_alpha=old.lora_alpha)
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    for old, new in _pairs(source, target):
        if isinstance(new, StandIn):
            continue
        # LoRA and quantisation add weights in different orders.
        variables = zip(_own_variables(old), _own_variables(new), strict=True)
        for old_variable, new_variable in variables:
            # On JAX a training step gives the buffers of its weights away.
            new_variable.assign(ops.copy(old_variable))
            new_variable.trainable = old_variable.trainable
    if hasattr(source, "_lora_enabled_layers"):
        target._lora_rank = source._lora_rank
        target._lora_enabled_layers = list(source._lora_enabled_layers)


def _pairs(old, new):
    """The layers at the same places of two models, from the outside in."""
    yield old, new
    if isinstance(new, StandIn):
        children = zip(
            kept_layers(old).values(), kept_layers(new).values(), strict=True
        )
    else:
        children = zip(old._layers, new._layers, strict=True)
    for pair in children:
        yield from _pairs(*pair)


def _own_variables(layer):
    variables = layer._trainable_variables + layer._non_trainable_variables
    return sorted(variables, key=lambda variable: variable.name)
