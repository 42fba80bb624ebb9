"""Which attention to put in the places of a model's own: names, layers and configs."""

import inspect

import keras

from keras_efficient_attn.layers import EfficientAttention, ReformerLSHAttention
from keras_efficient_attn.layers.attention.base import AttentionCall
from keras_efficient_attn.layers.attention.registry import (
    constructor_arguments,
    parse_attention,
    with_option,
)
from keras_efficient_attn.models.conversion.stand_ins import StandIn, stand_in_class

# What the model decides, and not whoever chooses an attention for it.
OF_THE_MODEL = {
    *inspect.signature(keras.layers.MultiHeadAttention.__init__).parameters,
    *inspect.signature(EfficientAttention.__init__).parameters,
    *("name", "dtype", "trainable"),
} - {"seed"}


def recorded(attention):
    """A name or a configuration, which JSON can hold, or a list of them.

    Args:
        attention: As for `convert_backbone`.

    Raises:
        TypeError: If it is of none of these kinds.
    """
    if isinstance(attention, list | tuple):
        return [_recorded_one(of_layer) for of_layer in attention]
    return _recorded_one(attention)


def of_each_layer(spec, count):
    """The specification of each layer that is replaced, a list.

    Args:
        spec: From `recorded`.
        count: Number of the layers.

    Raises:
        ValueError: If the specification is a list of another length.
    """
    if not isinstance(spec, list):
        return [spec] * count
    if len(spec) != count:
        raise ValueError(
            "`attention`, as a list, must have one entry for each layer that is "
            f"replaced, which are {count}. Received: a list of {len(spec)}"
        )
    return spec


def with_window(spec, window):
    """The specification of a layer, with another window.

    Raises:
        ValueError: If the layer has no window.
    """
    layer_class = _layer_class(spec)
    if "window" not in constructor_arguments(layer_class):
        raise ValueError(
            f"`window_budget` needs layers with a `window`, and {layer_class.__name__} "
            f"has none. Received: attention={spec!r}"
        )
    if isinstance(spec, str):
        return with_option(spec, "window", window)
    return {**spec, "config": {**spec["config"], "window": window}}


def _layer_class(spec):
    if isinstance(spec, str):
        return parse_attention(spec)[0]
    return type(keras.saving.deserialize_keras_object(spec))


def _recorded_one(attention):
    multi_head = keras.layers.MultiHeadAttention
    if isinstance(attention, type) and issubclass(attention, multi_head):
        # Its sizes will be the model's.
        attention = attention(num_heads=1, key_dim=2)
    if isinstance(attention, multi_head):
        return keras.saving.serialize_keras_object(attention)
    if isinstance(attention, str | dict):
        return attention
    raise TypeError(
        "`attention` must be a name such as 'performer:window=32', a layer that is a "
        "`keras.layers.MultiHeadAttention`, its configuration or its class; or a list "
        f"of these. Received: attention={attention!r}"
    )


def make_stand_in(spec, place):
    """The layer that is to stand in a place: not built, and not put there.

    Args:
        spec: Of one layer, from `of_each_layer`.
        place: A `Place`.

    Raises:
        ValueError: If there cannot be one.
    """
    layer_class, options = _class_and_options(spec)
    where = f"{layer_class.__name__} cannot take the place of {place.layer.path}"
    reason = _refusal(layer_class, options, place)
    if reason is not None:
        raise ValueError(f"{where}: {reason}")
    config = {**place.stand_in.geometry(place.layer), **options}
    stand_in = stand_in_class(place.stand_in, layer_class)
    try:
        # Options of a name are arguments, those of a configuration serialized.
        layer = (
            stand_in(**config)
            if isinstance(spec, str)
            else stand_in.from_config(config)
        )
        layer.receives_causal_mask = place.is_causal
        _check_causality(layer)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    return layer


def _class_and_options(spec):
    if isinstance(spec, str):
        layer_class, options = parse_attention(spec)
        taken = sorted(OF_THE_MODEL & set(options))
        if taken:
            raise ValueError(
                f"The model decides {', '.join(taken)}. Received: attention={spec!r}"
            )
        if "qk_norm" in constructor_arguments(layer_class):
            # The trained queries and keys have the norms they have.
            options.setdefault("qk_norm", False)
        return layer_class, options
    layer = keras.saving.deserialize_keras_object(spec)
    config = layer.get_config()
    return type(layer), {k: v for k, v in config.items() if k not in OF_THE_MODEL}


def _refusal(layer_class, options, place):
    if not issubclass(layer_class, EfficientAttention):
        return (
            "only an `EfficientAttention` can. To keep softmax in a layer, leave it "
            "out of `layers`."
        )
    if issubclass(layer_class, ReformerLSHAttention):
        return (
            "it has one projection for queries and keys, and would lose the trained "
            "projection of the keys."
        )
    rotates = hasattr(place.stand_in, "rotary_attribute")
    if rotates and options.get("rotary_wavelength") is not None:
        return (
            "the model rotates queries and keys itself. Received: "
            f"rotary_wavelength={options['rotary_wavelength']}"
        )
    if isinstance(place.layer, StandIn):
        return None
    return place.stand_in.refusal(place.layer)


def _check_causality(layer):
    x = keras.KerasTensor((None, None, layer.key_dim))
    layer._check_call(x, x, x, AttentionCall(causal=layer.receives_causal_mask))
