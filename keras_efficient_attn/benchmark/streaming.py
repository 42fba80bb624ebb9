"""Attention that streams: the layers' own state, or a key/value cache for softmax."""

import keras
from keras import ops

from keras_efficient_attn.layers import EfficientAttention


def initial_state(layer, batch_size, max_length):
    """The state of an attention layer before the first position.

    Args:
        layer: Built `EfficientAttention`, or Keras' `MultiHeadAttention`.
        batch_size: Rows.
        max_length: Positions that a cache has room for.

    Returns:
        Dict of tensors.

    Raises:
        ValueError: If the layer does not stream.
    """
    if isinstance(layer, EfficientAttention):
        return layer.initial_state(batch_size)
    if type(layer) is not keras.layers.MultiHeadAttention:
        raise ValueError(f"{type(layer).__name__} does not stream.")
    shape = (batch_size, max_length, layer.num_heads)
    return {
        "key": ops.zeros((*shape, layer.key_dim), layer.compute_dtype),
        "value": ops.zeros((*shape, layer.value_dim), layer.compute_dtype),
        "position": ops.zeros((), "int32"),
    }


def attend(layer, x, state):
    """Causal self-attention over `x` after what the state holds.

    For softmax the state is a cache of keys and values, written in place of its next
    rows; a query attends to all of it under a mask, as in KerasHub's models. It takes
    the first segment at once and later positions one at a time.

    Args:
        layer: As for `initial_state`.
        x: `(batch, length, dim)`.
        state: Dict of tensors.

    Returns:
        `(output, state)`.
    """
    if isinstance(layer, EfficientAttention):
        return layer(x, x, use_causal_mask=True, state=state)
    position = state["position"]
    start = (0, position, 0, 0)
    key = ops.slice_update(state["key"], start, layer.key_dense(x))
    value = ops.slice_update(state["value"], start, layer.value_dense(x))
    length = x.shape[1]
    state = {"key": key, "value": value, "position": position + length}
    if length > 1:
        return layer(x, x, use_causal_mask=True), state
    seen = ops.arange(key.shape[1]) <= position
    heads = ops.dot_product_attention(
        layer.query_dense(x), key, value, mask=seen[None, None, None]
    )
    return layer.output_dense(heads), state


def generate(step, token_inputs, state):
    """Sum of the outputs of one position at a time, and the state after them.

    The loop is the backend's own, compiled where the backend compiles.

    Args:
        step: `(x, state) -> (output, state)`, for `x` of one position.
        token_inputs: `(batch, steps, ...)`.
        state: Dict (or nesting) of tensors.

    Returns:
        `(total, state)`.
    """

    def one(index):
        start = (0, index) + (0,) * (len(token_inputs.shape) - 2)
        shape = (token_inputs.shape[0], 1, *token_inputs.shape[2:])
        return ops.slice(token_inputs, start, shape)

    def body(index, carry):
        total, state = carry
        output, state = step(one(index), state)
        return total + output, state

    first = step(one(0), state)
    return ops.fori_loop(1, token_inputs.shape[1], body, first)
