"""LoRA files of KerasHub, which a backbone and its converted copy both read."""

from keras_efficient_attn.models.conversion.keras_internals import (
    flat_layers,
    hidden_layers,
    projections,
)


def hide_adapter_weights(model, sites):
    """Hides, for a time, the layers that a converted backbone has beside the original.

    KerasHub knows layers with LoRA by their numbers among all that have weights, and
    kernels are, or hold, further such layers: codebooks, say.

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
    """The layers inside an adapter that are not the host's."""
    kept = {
        id(layer)
        for projection in projections(adapter).values()
        for layer in flat_layers(projection)
    }
    inside = flat_layers(adapter, include_self=False)
    return [layer for layer in inside if id(layer) not in kept]
