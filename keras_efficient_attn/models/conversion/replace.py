"""Replacing the attention layers of a model in place."""

import warnings

import keras

from keras_efficient_attn.models.conversion.calibration import (
    batches,
    calibrate_layers,
    check_can_calibrate,
    recorded_inputs,
)
from keras_efficient_attn.models.conversion.places import (
    attention_places,
    check_held,
    name_scopes,
    put,
    track_parameters,
)
from keras_efficient_attn.models.conversion.specification import (
    make_stand_in,
    of_each_layer,
    recorded,
)

COMPILED = (
    "train_function",
    "test_function",
    "predict_function",
    "generate_function",
)


def replace_attention(model, attention, layers=None, calibrate=None):
    """Replaces self-attention layers of a built model, in the model itself.

    For any Keras model that holds `keras.layers.MultiHeadAttention`, as an attribute
    of a layer, in a list or dict that is one, or in a functional graph; and for
    KerasHub's `CachedMultiHeadAttention` and the grouped-query attention of Llama,
    Qwen 2.5, Mistral and the first Gemma. The new layers take over the projections as
    they stand, and read padding and causality of masks, as in `convert_backbone`.
    Cross-attention stays: layers whose name says so, and in a functional graph those
    that are called with queries and values of different lengths.

    The model has to be compiled again, and **does not survive saving**: its blocks
    write softmax attention into their configuration, and what is loaded has softmax
    attention. For a backbone of KerasHub, `convert_backbone` makes a copy that does
    survive.

    Args:
        model: A built model or layer.
        attention: As for `convert_backbone`.
        layers: Indices, as for `convert_backbone`.
        calibrate: As for `convert_backbone`.

    Returns:
        The paths of the layers that were replaced, a list of strings.

    Raises:
        ValueError: If the model holds no such layer, or `attention` cannot stand in
            the place of one of them; the model is as it was.
        TypeError: If `attention` is of none of the kinds above.

    Example:

    ```python
    inputs = keras.Input((None, 16))
    attended = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(attended))
    replace_attention(model, "local:window=64")
    model.compile("adam", "mse")
    ```
    """
    stand_ins = replace_layers(model, recorded(attention), layers, calibrate)
    warnings.warn(
        f"{model.name} has to be compiled again, and does not survive saving: what is "
        "loaded has softmax attention. `convert_backbone` makes a copy of a backbone "
        "that does.",
        stacklevel=2,
    )
    return [layer.path for layer in stand_ins]


def replace_layers(model, spec, layers, calibrate=None):
    """`replace_attention`, of a specification that is `recorded`, without a word.

    Returns:
        The new layers.
    """
    places = attention_places(model)
    places = [places[index] for index in chosen(layers, len(places))]
    # All of them before any is put: a refusal leaves the model as it was.
    for place in places:
        check_held(place)
    specs = of_each_layer(spec, len(places))
    stand_ins = [make_stand_in(*pair) for pair in zip(specs, places, strict=True)]
    if calibrate is not None:
        check_can_calibrate(stand_ins)
        inputs = recorded_inputs(model, places, batches(calibrate))
    for place, layer in zip(places, stand_ins, strict=True):
        with name_scopes(place.layer.path):
            layer.take_over(place.layer)
    if calibrate is not None:
        calibrate_layers(stand_ins, inputs)
    for place, layer in zip(places, stand_ins, strict=True):
        put(place, layer)
    track_parameters(model)
    if isinstance(model, keras.Model):
        model.compiled = False
    for name in COMPILED:
        if hasattr(model, name):
            setattr(model, name, None)
    return stand_ins


def chosen(layers, count):
    """The indices in `layers`, sorted; all of them for `None`."""
    if layers is None:
        return list(range(count))
    try:
        indices = sorted(set(layers))
    except TypeError:
        indices = [None]
    if not indices or not all(
        isinstance(index, int) and 0 <= index < count for index in indices
    ):
        raise ValueError(
            "`layers` must be None or the indices of self-attention layers, from 0 to "
            f"{count - 1}. Received: layers={layers!r}"
        )
    return indices
