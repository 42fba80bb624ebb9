"""Plots the spans that a model has learned."""

import numpy as np

from keras_efficient_attn.layers.attention.adaptive_span.trimming import (
    adaptive_span_layers,
)


def plot_spans(model, path=None):
    """Plots the span of each head of each `AdaptiveSpan` layer, over the layers.

    Needs matplotlib.

    Args:
        model: A built `keras.Model`.
        path: Optional file to write the picture to, such as `"spans.png"`.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ValueError: If the model has no such layer.
    """
    layers = adaptive_span_layers(model)
    if not layers:
        raise ValueError(
            "`model` must have an AdaptiveSpan layer. Received: "
            f"{type(model).__name__} {model.name!r}"
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, layer in enumerate(layers, start=1):
        spans = np.sort(layer.spans())
        axes.plot(np.full(len(spans), i), spans, "k.", alpha=0.6)
    means = [layer.spans().mean() for layer in layers]
    numbers = range(1, len(layers) + 1)
    axes.plot(numbers, means, "k-", label="mean of the heads")
    # Most spans are short; the longest are hundreds of times as long.
    axes.set_yscale("symlog", linthresh=max(layer.ramp for layer in layers))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="layer", ylabel="span (positions)", xticks=numbers)
    axes.legend()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
