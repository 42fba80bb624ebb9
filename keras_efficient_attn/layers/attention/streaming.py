"""What models and measurements ask of a layer that streams, softmax included."""

import keras

from keras_efficient_attn.layers.attention.softmax import SoftmaxAttention


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


def initial_attention_state(layer, batch_size, max_length, memory_length=None):
    """The state of an attention layer before the first position.

    Args:
        layer: A `keras.layers.MultiHeadAttention`.
        batch_size: Rows in the batch.
        max_length: The longest context, for layers whose state grows with it; `None`
            for a state of constant size.
        memory_length: Of a `RelativePositionXL`. Defaults to what outputs need to be
            those of one call on the whole context; without `max_length`, to the
            layer's own.

    Raises:
        ValueError: If the layer has no state, or none of constant size where that is
            wanted.
    """
    name = type(layer).__name__
    if not hasattr(layer, "initial_state"):
        raise ValueError(f"{name} does not stream, and cannot generate.")
    fixed = max_length is None or memory_length is not None
    if fixed and getattr(layer, "remembers_inputs", False):
        return layer.initial_state(batch_size, memory_length)
    if not getattr(layer, "caches_keys", False):
        return layer.initial_state(batch_size)
    if max_length is None:
        raise ValueError(f"{name} has a state that grows with the context.")
    return layer.initial_state(batch_size, max_length)
