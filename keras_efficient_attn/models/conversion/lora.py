"""LoRA files of KerasHub, for a backbone and its converted copy alike."""

from keras_efficient_attn.layers.keras_internals import (
    flat_layers,
    projections,
)
from keras_efficient_attn.models.keras_hub_internals import (
    hidden_layers,
)


def hide_adapter_weights(model, sites):
    """Context that hides a converted backbone's additional layers.

    KerasHub numbers layers with LoRA among all layers with weights. Kernels add such
    layers, for example codebooks.

    Args:
        model: A converted backbone.
        sites: Its `AttentionSite`s.

    Returns:
        A context manager.
    """
    adapters = [site.layer for site in sites if site.is_converted]
    return hidden_layers(
        model, [layer for adapter in adapters for layer in _own_layers(adapter)]
    )


def _own_layers(adapter):
    """The layers of an adapter that the host does not have."""
    kept = {
        id(layer)
        for projection in projections(adapter).values()
        for layer in flat_layers(projection)
    }
    return [layer for layer in flat_layers(adapter)[1:] if id(layer) not in kept]
