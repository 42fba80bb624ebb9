"""The attention to convert to: names, layers and configurations."""

import keras

from keras_efficient_attn.layers import EfficientAttention
from keras_efficient_attn.layers.attention.registry import (
    constructor_arguments,
    parse_attention,
)
from keras_efficient_attn.ops.common.checks import is_positive_int

# The name in a pattern for layers that keep softmax.
FULL = "full"
# The model, not the specification, determines these arguments.
MODEL_ARGUMENTS = {
    *constructor_arguments(EfficientAttention),
    *("name", "dtype", "trainable"),
} - {"seed"}


def normalize_spec(attention):
    """A name or a configuration, serialisable to JSON, or a list of these.

    Args:
        attention: As for `convert_backbone`.

    Raises:
        TypeError: If `attention` is of another kind.
    """
    if isinstance(attention, list | tuple):
        return [_normalize_one(spec) for spec in attention]
    return _normalize_one(attention)


def is_pattern(attention):
    """Whether it is a dict of names to numbers of layers, not a configuration."""
    return isinstance(attention, dict) and "class_name" not in attention


def expand_pattern(pattern, count):
    """The replacements and layers of a pattern: `(attention, layers)`.

    Args:
        pattern: Dict of names to numbers of layers, in the order of the model; repeated
            from the start at its end. `"full"` layers keep softmax.
        count: Number of self-attention layers of the model.

    Raises:
        ValueError: If the pattern does not map names to positive integers, or replaces
            no layer.
    """
    names = []
    for name, number in pattern.items():
        if not isinstance(name, str) or not is_positive_int(number):
            raise ValueError(
                "`attention`, as a pattern, must be a dict of names to positive "
                f"integers. Received: attention={pattern!r}"
            )
        names += [name] * number
    layers = [i for i in range(count) if names and names[i % len(names)] != FULL]
    if not layers:
        raise ValueError(
            f"The pattern replaces none of the {count} self-attention layers. "
            f"Received: attention={pattern!r}"
        )
    return [names[i % len(names)] for i in layers], layers


def specs_per_layer(spec, count):
    """The specification of each replaced layer, a list.

    Args:
        spec: From `normalize_spec`.
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


def make_adapter(spec, site):
    """The adapter for a site, with its kernel; not built and not installed.

    Args:
        spec: The specification of one layer, from `specs_per_layer`.
        site: An `AttentionSite`.

    Raises:
        ValueError: If the layer cannot replace the model's.
    """
    layer_class, options = _class_and_options(spec)
    where = f"{layer_class.__name__} cannot take the place of {site.layer.path}"
    reason = _refusal(layer_class, options, site)
    if reason is not None:
        raise ValueError(f"{where}: {reason}")
    config = {**site.adapter_class.geometry(site.layer), **options}
    try:
        # A name's options are arguments; a configuration's options are serialized.
        kernel = (
            layer_class(**config)
            if isinstance(spec, str)
            else layer_class.from_config(config)
        )
        x = keras.KerasTensor((None, None, kernel.key_dim))
        kernel.compute_output_spec(x, x, use_causal_mask=site.is_causal)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    return site.adapter_class(kernel, site)


def _normalize_one(attention):
    multi_head = keras.layers.MultiHeadAttention
    if isinstance(attention, type) and issubclass(attention, multi_head):
        # The model determines its sizes.
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


def _class_and_options(spec):
    if isinstance(spec, str):
        layer_class, options = parse_attention(spec)
        taken = sorted(MODEL_ARGUMENTS & set(options))
        if taken:
            raise ValueError(
                f"The model decides {', '.join(taken)}. Received: attention={spec!r}"
            )
        if "qk_norm" in constructor_arguments(layer_class):
            # Keep the norms of the trained queries and keys.
            options.setdefault("qk_norm", False)
        return layer_class, options
    layer = keras.saving.deserialize_keras_object(spec)
    config = layer.get_config()
    return type(layer), {k: v for k, v in config.items() if k not in MODEL_ARGUMENTS}


def _refusal(layer_class, options, site):
    if not issubclass(layer_class, EfficientAttention):
        return "only an `EfficientAttention` can, and not softmax."
    refusal = layer_class.conversion_refusal(options)
    if refusal is not None:
        return refusal
    if site.adapter_class.always_causal and options.get("rotary_wavelength"):
        return (
            "the model rotates queries and keys itself. Received: "
            f"rotary_wavelength={options['rotary_wavelength']}"
        )
    return None if site.is_converted else site.adapter_class.refusal(site.layer)
