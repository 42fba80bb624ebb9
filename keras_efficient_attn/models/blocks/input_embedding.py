"""From tokens to vectors."""

import math

import keras

from keras_efficient_attn.models.blocks.positions import get_positions
from keras_efficient_attn.models.hashed_ngrams import HashedNGrams
from keras_efficient_attn.models.ngram_recall import NGramRecall


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class InputEmbedding(keras.layers.Layer):
    """Embeddings of tokens, n-grams, what followed them, and positions, added up.

    Args:
        vocabulary_size: Number of tokens.
        hidden_dim: Width.
        positions: `"sinusoidal"`, `"learned"`, or `None`, the default.
        max_length: Number of learned positions.
        max_position_offset: Largest random offset of positions in training. Defaults to
            0.
        ngram_orders: Lengths of hashed n-grams. Defaults to `()`: none.
        ngram_rows: Rows of each order's table.
        ngram_width: Width of its rows.
        recall_orders: Lengths of n-grams whose last followers are recalled. Defaults
            to `()`: none.
        tie_weights: Whether `token_embedding(x, reverse=True)`, which gives float32
            logits, shares the embedding's weights. Defaults to `True`.
        scale: Whether to multiply token embeddings by `√hidden_dim`. Defaults to
            `False`.
        dropout: Rate of dropout on the sum. Defaults to 0.
        **kwargs: Those of `keras.layers.Layer`.

    Call arguments:
        token_ids: Integers `(batch, length)`.
        state: Optional, from `get_initial_state` or the previous segment's call.

    Returns:
        `(batch, length, hidden_dim)`; `(output, state)` with `state`.
    """

    def __init__(
        self,
        vocabulary_size,
        hidden_dim,
        positions=None,
        max_length=None,
        max_position_offset=0,
        ngram_orders=(),
        ngram_rows=2**14,
        ngram_width=32,
        recall_orders=(),
        tie_weights=True,
        scale=False,
        dropout=0.0,
        **kwargs,
    ):
        # autocast=False: a state keeps its dtype.
        super().__init__(autocast=False, **kwargs)
        self.scale = scale
        self.position_kind = positions
        self.token_embedding = keras.layers.ReversibleEmbedding(
            vocabulary_size,
            hidden_dim,
            tie_weights=tie_weights,
            reverse_dtype="float32",
            dtype=self.dtype_policy,
            name="token_embedding",
        )
        self.ngrams = None
        if ngram_orders:
            self.ngrams = HashedNGrams(
                hidden_dim,
                orders=ngram_orders,
                rows=ngram_rows,
                width=ngram_width,
                dtype=self.dtype_policy,
                name="ngrams",
            )
        self.recall = None
        if recall_orders:
            self.recall = NGramRecall(
                vocabulary_size,
                hidden_dim,
                orders=recall_orders,
                dtype=self.dtype_policy,
                name="recall",
            )
        self.positions = get_positions(
            positions,
            max_length,
            max_position_offset,
            dtype=self.dtype_policy,
            name="positions",
        )
        self.dropout = keras.layers.Dropout(
            dropout, dtype=self.dtype_policy, name="dropout"
        )

    def build(self, input_shape):
        self.token_embedding.build(input_shape)
        if self.ngrams is not None:
            self.ngrams.build(input_shape)
        if self.recall is not None:
            self.recall.build(input_shape)
        if self.positions is not None:
            self.positions.build((*input_shape, self.token_embedding.output_dim))

    def get_initial_state(self, batch_size):
        """The state before the first token, a dict of tensors, batch first."""
        streaming = {
            "ngrams": self.ngrams,
            "recall": self.recall,
            "positions": self.positions,
        }
        return {
            name: layer.get_initial_state(batch_size)
            for name, layer in streaming.items()
            if layer is not None
        }

    def call(self, token_ids, state=None, training=None):
        new_state = {}

        def apply(name, layer, x):
            if state is None:
                return layer(x)
            output, new_state[name] = layer(x, state=state[name])
            return output

        x = self.token_embedding(token_ids)
        if self.scale:
            x = x * math.sqrt(self.token_embedding.output_dim)
        if self.ngrams is not None:
            x = x + apply("ngrams", self.ngrams, token_ids)
        if self.recall is not None:
            x = x + apply("recall", self.recall, token_ids)
        if self.positions is not None:
            x = apply("positions", self.positions, x)
        x = self.dropout(x, training=training)
        return x if state is None else (x, new_state)

    def compute_output_spec(self, token_ids, state=None, training=None):
        shape = (*token_ids.shape, self.token_embedding.output_dim)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self):
        ngrams = self.ngrams
        return {
            **super().get_config(),
            "vocabulary_size": self.token_embedding.input_dim,
            "hidden_dim": self.token_embedding.output_dim,
            "positions": self.position_kind,
            "max_length": getattr(self.positions, "max_length", None),
            "max_position_offset": getattr(self.positions, "max_offset", 0),
            "ngram_orders": () if ngrams is None else ngrams.orders,
            "ngram_rows": 2**14 if ngrams is None else ngrams.rows,
            "ngram_width": 32 if ngrams is None else ngrams.width,
            "recall_orders": () if self.recall is None else self.recall.orders,
            "tie_weights": self.token_embedding.tie_weights,
            "scale": self.scale,
            "dropout": self.dropout.rate,
        }
