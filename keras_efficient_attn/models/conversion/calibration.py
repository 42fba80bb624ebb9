"""Fitting efficient attention to what a trained model computes on data."""

import inspect

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.models.conversion.recording import recorded_calls, valid_rows


def recorded_inputs(model, places, inputs):
    """What attention layers read while a model runs over inputs once.

    Args:
        model: A built model.
        places: List of `Place`.
        inputs: From `batches`.

    Returns:
        A list for each place, of `(query, key, mask, causal)`: arrays `(batch,
        length, dim)`, boolean `(batch, length)` or `None`, and a boolean.

    Raises:
        ValueError: If the model does not call one of them.
    """
    recorded = [[] for _ in places]
    for batch in inputs:
        found = recorded_calls(model, [place.layer for place in places], batch)
        for place, calls, kept in zip(places, found, recorded, strict=True):
            for call in calls:
                query, *_ = call.arguments.values()
                key = call.arguments.get("key")
                key = call.arguments.get("value", query) if key is None else key
                arrays = {id(x): _array(x) for x in (query, key)}
                mask = valid_rows(place, call)
                causal = call.arguments.get("use_causal_mask", place.is_causal)
                kept.append((arrays[id(query)], arrays[id(key)], mask, causal))
    for place, kept in zip(places, recorded, strict=True):
        if not kept:
            raise ValueError(
                "The model does not call all of its attention layers, and those it "
                f"does not have nothing to be fitted to. Received: {place.layer.path}"
            )
    return recorded


def batches(data):
    """The batches in `calibrate`, a list, each as the model takes it.

    Args:
        data: A batch: an array, a dict of arrays, or a tuple `(inputs, targets)` or
            `(inputs, targets, weights)`, of which the inputs are taken. Or an iterable
            of such batches: a list, a `tf.data.Dataset`, a `DataLoader`, ….

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no batch.
    """
    if isinstance(data, dict | tuple) or hasattr(data, "shape"):
        data = [data]
    try:
        found = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in data]
    except TypeError:
        raise TypeError(
            "`calibrate` must be a batch, or an iterable of batches. Received: "
            f"calibrate={data!r}"
        ) from None
    if not found:
        raise ValueError("`calibrate` must hold at least one batch. Received: none")
    return found


def calibrate_layers(layers, inputs):
    """Calibrates built layers, those that can be.

    Args:
        layers: List of layers.
        inputs: From `recorded_inputs`, in the same order.
    """
    for layer, found in zip(layers, inputs, strict=True):
        if not layer.can_calibrate:
            continue
        queries, keys, masks, causal = zip(*found, strict=True)
        same = all(q is k for q, k in zip(queries, keys, strict=True))
        options = {} if same else {"query": _with_masks(queries, masks)}
        # For some layers, the fit is another where no query sees later keys.
        if "use_causal_mask" in inspect.signature(layer.calibrate).parameters:
            options["use_causal_mask"] = all(causal)
        layer.calibrate(_with_masks(keys, masks), **options)


def can_calibrate(layers):
    """Whether one of the layers has something to fit."""
    return any(layer.can_calibrate for layer in layers)


def check_can_calibrate(layers):
    """Raises `ValueError` if no layer has anything to fit."""
    if not can_calibrate(layers):
        raise ValueError(
            f"{layer_names(layers)} with these options has nothing to fit, and "
            "`calibrate` no use but for layers='auto' and `window_budget`. VQAttention "
            "has, and PerformerAttention with `calibrated=True`."
        )


def layer_names(stand_ins):
    """The names of the layers that stand-ins are, each once."""
    names = [type(layer).__bases__[1].__name__ for layer in stand_ins]
    return ", ".join(dict.fromkeys(names))


def _with_masks(arrays, masks):
    return [
        x if mask is None else (x, mask) for x, mask in zip(arrays, masks, strict=True)
    ]


def _array(x):
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))
