"""Attention layers for models, from names, configurations or templates."""

import keras
import keras_hub

from keras_efficient_attn.layers import EfficientAttention, get_attention
from keras_efficient_attn.layers.attention.softmax import SoftmaxAttention
from keras_efficient_attn.models.blocks.positions import MAX_WAVELENGTH

# Softmax layers that are replaced by a layer with a state.
STATELESS_SOFTMAX = (
    keras.layers.MultiHeadAttention,
    keras_hub.layers.CachedMultiHeadAttention,
)


def attention_spec(attention):
    """A name, or the configuration of a layer, serialisable to JSON.

    Args:
        attention: A name with options, a configuration from
            `keras.saving.serialize_keras_object`, or a layer.

    Raises:
        TypeError: For anything else.
    """
    if isinstance(attention, str | dict):
        return attention
    if isinstance(attention, keras.layers.MultiHeadAttention):
        return keras.saving.serialize_keras_object(attention)
    raise TypeError(
        "`attention` must be a name such as 'performer:feature_map=elu', the "
        "configuration of a layer, a layer that is a "
        "`keras.layers.MultiHeadAttention`, or a list of them. Received: "
        f"attention={attention!r}"
    )


def make_attention(spec, num_heads, key_dim, use_bias, rotary, name, dtype):
    """A new layer for one block.

    Args:
        spec: A name or a configuration, as from `attention_spec`.
        num_heads: Number of heads, for a name.
        key_dim: Width of a head, for a name.
        use_bias: Whether projections have biases, for a name.
        rotary: Whether to give the layer rotary positions.
        name: Name of the layer.
        dtype: Policy of the layer.

    Raises:
        ValueError: If the specification does not define an attention layer, or if
            `rotary` is set and the layer has no rotary positions.
    """
    if isinstance(spec, str):
        layer = get_attention(
            spec, num_heads=num_heads, key_dim=key_dim, use_bias=use_bias
        )
    else:
        layer = keras.saving.deserialize_keras_object(spec)
    if type(layer) in STATELESS_SOFTMAX:
        layer = SoftmaxAttention.from_config(layer.get_config())
    if not isinstance(layer, EfficientAttention):
        raise ValueError(
            "`attention` must be a `keras.layers.MultiHeadAttention`, or an "
            "`EfficientAttention`, which layers of your own must subclass; or the "
            f"configuration of one. Received: {type(layer).__name__}, attention={spec}"
        )
    config = {**layer.get_config(), "name": name, "dtype": dtype}
    if rotary:
        if "rotary_wavelength" not in config:
            raise ValueError(
                f"positions='rotary' needs attention layers that rotate queries and "
                f"keys, and {type(layer).__name__} does not. Received: "
                f"attention={spec}"
            )
        if config.get("rotary_wavelength") is None:
            config["rotary_wavelength"] = MAX_WAVELENGTH
    return type(layer).from_config(config)
