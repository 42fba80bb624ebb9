"""The language model of `--model`: small, causal, pre-norm."""

import keras
from keras import ops

from keras_efficient_attn.benchmark import operations, streaming
from keras_efficient_attn.layers import get_attention

VOCABULARY = 256
BLOCKS = 2
EXPANSION = 4


class LanguageModel(keras.layers.Layer):
    """Embedding, blocks of attention and feed-forward, and logits.

    Without positions, which none of the times depends on.

    Args:
        identifier: The attention, for `get_attention`.
        num_heads: Heads.
        head_dim: Size of a head; the model is `num_heads · head_dim` wide.
        **kwargs: Arguments of the layer, such as `dtype`.
    """

    def __init__(self, identifier, num_heads, head_dim, **kwargs):
        super().__init__(**kwargs)
        width, policy = num_heads * head_dim, self.dtype_policy
        dense = keras.layers.Dense
        self.embedding = keras.layers.Embedding(VOCABULARY, width, dtype=policy)
        self.attentions = [
            get_attention(
                identifier, num_heads=num_heads, key_dim=head_dim, dtype=policy
            )
            for _ in range(BLOCKS)
        ]
        self.expansions = [
            dense(EXPANSION * width, "gelu", dtype=policy) for _ in range(BLOCKS)
        ]
        self.contractions = [dense(width, dtype=policy) for _ in range(BLOCKS)]
        self.norms = [
            keras.layers.LayerNormalization(dtype=policy) for _ in range(2 * BLOCKS + 1)
        ]
        self.logits = dense(VOCABULARY, dtype=policy)

    def build(self, tokens_shape):
        hidden = (*tokens_shape, self.embedding.output_dim)
        self.embedding.build(tokens_shape)
        for attention in self.attentions:
            attention.build(hidden, hidden)
        for expansion, contraction in zip(
            self.expansions, self.contractions, strict=True
        ):
            expansion.build(hidden)
            contraction.build((*hidden[:-1], EXPANSION * hidden[-1]))
        for layer in (*self.norms, self.logits):
            layer.build(hidden)

    def initial_state(self, batch_size, max_length):
        """The states of the attentions, as a list."""
        return [
            streaming.initial_state(attention, batch_size, max_length)
            for attention in self.attentions
        ]

    def call(self, tokens, state=None, training=None):
        """Logits of `tokens` `(batch, length)`; with `state`, `(logits, state)`."""
        x = self.embedding(tokens)
        states = []
        for i, attention in enumerate(self.attentions):
            normed = self.norms[2 * i](x)
            if state is None:
                attended = attention(
                    normed, normed, use_causal_mask=True, training=training
                )
            else:
                attended, after = streaming.attend(attention, normed, state[i])
                states.append(after)
            x = x + attended
            normed = self.norms[2 * i + 1](x)
            x = x + self.contractions[i](self.expansions[i](normed))
        logits = self.logits(self.norms[-1](x))
        return logits if state is None else (logits, states)

    def operations(self, batch, length):
        """Useful operations of a forward pass, or `None`."""
        return self._sum(batch, length, operations.layer_operations, True)

    def decode_operations(self, batch, length):
        """Useful operations of one more position, or `None`."""
        return self._sum(batch, length, operations.decode_operations)

    def _sum(self, batch, length, count, *arguments):
        counts = [count(a, batch, length, *arguments) for a in self.attentions]
        if None in counts:
            return None
        positions = batch * (1 if count is operations.decode_operations else length)
        width = self.embedding.output_dim
        dense = BLOCKS * 4 * EXPANSION * width**2 + 2 * width * VOCABULARY
        return sum(counts) + positions * dense


def next_token_loss(logits, targets):
    """Mean cross-entropy in nats, in float32 or wider."""
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            targets, ops.cast(logits, "float32"), from_logits=True
        )
    )


def gradient_descent(weights, gradients, learning_rate=1e-3):
    """The weights after a step of plain gradient descent."""
    return [
        weight - ops.cast(learning_rate, gradient.dtype) * gradient
        for weight, gradient in zip(weights, gradients, strict=True)
    ]
