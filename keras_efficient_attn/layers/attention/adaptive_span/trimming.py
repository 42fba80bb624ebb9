"""Trims the windows of a model's AdaptiveSpan layers, also during training."""

import keras

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

    def __init__(self, every=1000):
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
