"""Fitting efficient attention to what a trained model computes on data."""

import inspect

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.models.swap.recording import recorded_calls, valid_rows


def recorded_inputs(model, places, data):
    """What attention layers read while a model runs over data once.

    Args:
        model: A built model.
        places: List of `Place`.
        data: As `calibrate` of `convert_backbone`.

    Returns:
        A list for each place, of `(query, value, mask, causal)`: arrays `(batch,
        length, dim)`, boolean `(batch, length)` or `None`, and a boolean.

    Raises:
        ValueError: If there is no batch.
    """
    inputs = [[] for _ in places]
    for batch in batches(data):
        found = recorded_calls(model, [place.layer for place in places], batch)
        for place, calls, kept in zip(places, found, inputs, strict=True):
            for call in calls:
                query, *_ = call.arguments.values()
                value = call.arguments.get("value", query)
                arrays = {id(x): _array(x) for x in (query, value)}
                mask = valid_rows(place, call)
                causal = call.arguments.get("use_causal_mask", place.is_causal)
                kept.append((arrays[id(query)], arrays[id(value)], mask, causal))
    if not any(inputs):
        raise ValueError("`calibrate` must hold at least one batch. Received: none")
    return inputs


def batches(data):
    """The batches in `calibrate`, each as the model takes it.

    Args:
        data: A batch (an array, or a dict of arrays), or an iterable of batches: a
            list, a `tf.data.Dataset`, a `DataLoader`, …. Of `(inputs, targets)` and
            `(inputs, targets, weights)` the inputs.

    Raises:
        TypeError: If it is none of these.
    """
    if isinstance(data, dict) or hasattr(data, "shape"):
        yield data
        return
    try:
        iterator = iter(data)
    except TypeError:
        raise TypeError(
            "`calibrate` must be a batch, or an iterable of batches. Received: "
            f"calibrate={data!r}"
        ) from None
    for batch in iterator:
        yield keras.utils.unpack_x_y_sample_weight(batch)[0]


def calibrate_layers(layers, inputs):
    """Calibrates built layers.

    Args:
        layers: List of layers that can.
        inputs: From `recorded_inputs`, in the same order.
    """
    for layer, found in zip(layers, inputs, strict=True):
        queries, values, masks, causal = zip(*found, strict=True)
        same = all(q is v for q, v in zip(queries, values, strict=True))
        options = {} if same else {"query": _with_masks(queries, masks)}
        # For some layers, the fit is another where no query sees later keys.
        if "use_causal_mask" in inspect.signature(layer.calibrate).parameters:
            options["use_causal_mask"] = all(causal)
        layer.calibrate(_with_masks(values, masks), **options)


def check_can_calibrate(layer):
    """Raises `ValueError` for a layer that has nothing to fit."""
    if not layer.can_calibrate:
        raise ValueError(
            f"{type(layer).__bases__[1].__name__} with these options has nothing to "
            "fit, and `calibrate` no use but for layers='auto'. VQAttention has, and "
            "PerformerAttention with `calibrated=True`."
        )


def _with_masks(arrays, masks):
    return [
        x if mask is None else (x, mask) for x, mask in zip(arrays, masks, strict=True)
    ]


def _array(x):
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))
