"""What models and measurements ask of a layer that streams, softmax included."""

import keras

from keras_efficient_attn.layers.softmax_attention import SoftmaxAttention


def with_state(layer, stateless=(keras.layers.MultiHeadAttention,)):
    """The layer, or a `SoftmaxAttention` in the place of softmax without a state.

    Args:
        layer: A `keras.layers.MultiHeadAttention`.
        stateless: Classes to replace; their subclasses stay as they are.

    Returns:
        `layer`, or a new layer of the same configuration, with weights of its own.
    """
    if type(layer) not in stateless:
        return layer
    return SoftmaxAttention.from_config(layer.get_config())


def initial_attention_state(layer, batch_size, max_length):
    """The state of an attention layer before the first position.

    Raises:
        ValueError: If the layer has none.
    """
    if not hasattr(layer, "initial_state"):
        raise ValueError(
            f"{type(layer).__name__} does not stream, and cannot generate."
        )
    if getattr(layer, "caches_keys", False):
        return layer.initial_state(batch_size, max_length)
    return layer.initial_state(batch_size)
