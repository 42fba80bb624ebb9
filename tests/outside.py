"""An attention layer that the package does not know."""

import keras
import numpy as np

from keras_efficient_attn import EfficientAttention, ops
from keras_efficient_attn.layers import register_attention


@register_attention("square")
@keras.saving.register_keras_serializable(package="tests")
class SquareAttention(EfficientAttention):
    """Weights `(scale · query · key)²`: products of all pairs of coordinates.

    Args:
        scale: Positive float. Defaults to 1.
    """

    def __init__(self, *args, scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def attend(self, query, key, value, call):
        output = ops.linear_attention(
            self.features(query),
            self.features(key),
            keras.ops.cast(value, self.state_dtype),
            key_mask=call.key_mask,
            causal=call.causal,
            state=call.state,
        )
        heads, state = output if call.state is not None else (output, None)
        return self._dropout_layer(heads, training=call.training), state

    def features(self, x):
        x = keras.ops.cast(x, self.state_dtype) * (self.scale / self.key_dim) ** 0.5
        pairs = x[..., :, None] * x[..., None, :]
        return keras.ops.reshape(pairs, (*keras.ops.shape(x)[:3], self.key_dim**2))

    def state_spec(self, batch_size, max_length):
        sizes = (batch_size, self.num_heads, self.key_dim**2, self.value_dim)
        return ops.linear_attention_state_spec(*sizes, self.state_dtype)

    def operations(self, length, causal):
        return 4 * self.num_heads * self.key_dim**2 * self.value_dim * length

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}


def square_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """The definition, in float64."""
    weights = (np.einsum("bthd,bshd->bhts", query, key) * layer.scale) ** 2
    if causal:
        weights = np.tril(weights)
    if key_mask is not None:
        weights = weights * np.asarray(key_mask)[:, None, None]
    totals = weights.sum(-1, keepdims=True)
    weights = weights / np.where(totals > 0, totals, 1.0)
    return np.einsum("bhts,bshd->bthd", weights, value), weights
