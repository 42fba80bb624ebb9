"""The attention of a backbone's blocks, from names, configurations or templates."""

import keras
import keras_hub

from keras_efficient_attn.layers import EfficientAttention, get_attention
from keras_efficient_attn.layers.attention.softmax import SoftmaxAttention
from keras_efficient_attn.models.blocks.positions import MAX_WAVELENGTH
from keras_efficient_attn.ops.common.checks import check_positive_int

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
        "`attention` must be a name such as 'performer:feature_map=elu', a layer that "
        "is a `keras.layers.MultiHeadAttention`, or its configuration (to convert a "
        f"model, also its class); or a list of these. Received: attention={attention!r}"
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


def gated_attention_units(attention, hidden_dim, key_dim: int = 128):
    """Arguments of `EfficientTransformerBackbone` for blocks of gated attention units.

    ```
    u, v = silu(x W_u), silu(x W_v)         of width 2 · hidden_dim
    y = x + (attention(x W_q, x W_k, v) ⊙ u) W_o,   x normalised before
    ```

    One head of attention between two gated projections takes the place of attention
    with several heads and of the feed-forward network: there is none, and two units are
    about as large as a block with both.

    Args:
        attention: Name of an attention layer with options, such as `"vq:window=64"`.
        hidden_dim: Width of the model.
        key_dim: Width of queries and keys. Defaults to 128.

    Returns:
        Dict of `hidden_dim`, `intermediate_dim`, `num_heads`, `head_dim` and
        `attention`.

    Raises:
        TypeError: If `attention` is not a name.
        ValueError: If a size is not a positive integer.

    Example:

    >>> from keras_efficient_attn.models import (
    ...     EfficientTransformerBackbone,
    ...     gated_attention_units,
    ... )
    >>> units = gated_attention_units("local:window=8", hidden_dim=16, key_dim=4)
    >>> backbone = EfficientTransformerBackbone(256, num_layers=2, **units)

    Reference:
        - [Hua et al., 2022](https://arxiv.org/abs/2202.10447)
    """
    if not isinstance(attention, str):
        raise TypeError(
            "`attention` of gated attention units must be a name with options, such as "
            f"'local:window=64'. Received: attention={attention!r}"
        )
    check_positive_int("hidden_dim", hidden_dim)
    check_positive_int("key_dim", key_dim)
    separator = "," if ":" in attention else ":"
    options = (
        f"value_dim={2 * hidden_dim},use_gate=True,gate_activation=silu,"
        "value_activation=silu"
    )
    return {
        "hidden_dim": hidden_dim,
        "intermediate_dim": None,
        "num_heads": 1,
        "head_dim": key_dim,
        "attention": f"{attention}{separator}{options}",
    }
