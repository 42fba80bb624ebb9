"""Fitting efficient attention to what a trained model computes on data."""

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
        A list for each place, of `(query, value, mask)`: arrays `(batch, length,
        dim)`, and boolean `(batch, length)` or `None`.

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
                kept.append((arrays[id(query)], arrays[id(value)], mask))
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
        layers: List of layers that have `calibrate`.
        inputs: From `recorded_inputs`, in the same order.
    """
    for layer, found in zip(layers, inputs, strict=True):
        queries, values, masks = zip(*found, strict=True)
        same = all(q is v for q, v in zip(queries, values, strict=True))
        layer.calibrate(
            _with_masks(values, masks),
            query=None if same else _with_masks(queries, masks),
        )


def check_can_calibrate(layer_class):
    """Raises `ValueError` for a class of layers that have nothing to fit."""
    if not hasattr(layer_class, "calibrate"):
        raise ValueError(
            f"{layer_class.__name__} has nothing to fit, and no use for `calibrate`, "
            "unless layers='auto' is to choose by it."
        )


def _with_masks(arrays, masks):
    return [
        x if mask is None else (x, mask) for x, mask in zip(arrays, masks, strict=True)
    ]


def _array(x):
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))
