"""Trims the windows of a model's AdaptiveSpan layers, also during training."""

import keras
import numpy as np

from keras_efficient_attn.layers.attention.adaptive_span.layer import AdaptiveSpan
from keras_efficient_attn.ops.common.backend import BACKEND
from keras_efficient_attn.ops.common.checks import check_positive_int


def trim_spans(model):
    """Cuts the windows of all `AdaptiveSpan` layers of a model to the keys in use.

    See `AdaptiveSpan.trim`. If a window changed, the model and the models in it compile
    their functions again. Functions compiled elsewhere, such as by `jax.jit`, keep
    their windows.

    Args:
        model: A `keras.Model` whose weights are up to date. While `fit` runs on JAX
            they are not: use `TrimSpans`.

    Returns:
        Whether a window changed.
    """
    changed = False
    for layer in adaptive_span_layers(model):
        before = layer.window
        changed = layer.trim() != before or changed
    if changed:
        for part in model._flatten_layers():
            if isinstance(part, keras.Model):
                _compile_again(part)
    return changed


def adaptive_span_layers(model):
    """All `AdaptiveSpan` layers of a model, in order."""
    return [
        layer for layer in model._flatten_layers() if isinstance(layer, AdaptiveSpan)
    ]


class TrimSpans(keras.callbacks.Callback):
    """Trims the `AdaptiveSpan` layers of a model every `every` training steps.

    A changed window makes the model compile its functions again, which takes as long as
    the first compilation: trim rarely.

    Args:
        every: Positive integer: training steps between calls of `trim_spans`. Defaults
            to 1,000.

    Raises:
        ValueError: If `every` is not a positive integer.

    Example:

    ```python
    model.fit(x, y, callbacks=[keras_efficient_attn.layers.TrimSpans(every=500)])
    ```
    """

    def __init__(self, every: int = 1000):
        super().__init__()
        check_positive_int("every", every)
        self.every = every
        self._steps = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._last_batch = -1

    def on_train_batch_end(self, batch, logs=None):
        # With `steps_per_execution`, several steps end at once.
        before = self._steps // self.every
        self._steps += batch - self._last_batch
        self._last_batch = batch
        if self._steps // self.every == before:
            return
        if BACKEND == "jax":
            # The trainer holds the weights while `fit` runs.
            self.model.jax_state_sync()
        trim_spans(self.model)


def _compile_again(model):
    if BACKEND == "jax":
        # JAX would treat the bound method as the function that it has compiled.
        for name in ("train_step", "test_step", "predict_step"):
            setattr(model, name, _new_function(model, name))
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is not None:
            getattr(model, f"make_{kind}_function")(force=True)
    if getattr(model, "generate_function", None) is not None:
        # KerasHub's models create it again in the next call.
        model.generate_function = None


def _new_function(model, name):
    method = getattr(type(model), name)

    def step(*args, **kwargs):
        return method(model, *args, **kwargs)

    return step


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
