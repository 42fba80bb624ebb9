"""The token that followed the last occurrence of the current n-gram."""

import keras
from keras import ops

from byte_lm.hashed_ngrams import (
    MAX_VOCABULARY,
    PRIME,
    check_orders,
    check_size,
    hashed_ngrams,
    last_tokens,
    state_spec,
)


@keras.saving.register_keras_serializable(package="byte_lm")
class NGramRecall(keras.layers.Layer):
    """Embeddings of the tokens that followed the last n-grams' earlier occurrences.

    ```
    s[t]      = the last s < t where the n tokens up to s are those up to t
    output[t] = Σ_n embedding_n[token[s[t] + 1]], or [none] where there is no such s
    ```

    This is attention to one position, whose weights need no learning: a hard-wired
    induction head, which a Transformer takes long to learn. N-grams are compared by a
    hash, and positions found by sorting, in `N log N` of the length. The state is a
    table of followers by hash, of constant size.

    Args:
        vocabulary_size: Number of tokens.
        dim: Width of the output.
        orders: The lengths n of the n-grams. Defaults to `(2, 3, 4, 5, 6, 8)`.
        rows: Number of values of the hash, at most 1,048,573. Defaults to 32,768.
            In a text with many more n-grams, some are recalled wrongly.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: Integers `(batch, length)`, not negative and below `vocabulary_size`.
        mask: Optional boolean `(batch, length)`, true and then false: the tokens of a
            row that exist.
        state: Optional, from `get_initial_state` or the previous segment's call.

    Returns:
        `(batch, length, dim)`; `(output, state)` with `state`.

    Raises:
        ValueError: If `orders` are not distinct positive integers, or another
            argument is out of range.

    Example:

    >>> layer = NGramRecall(256, 64, orders=(2, 4))
    >>> layer(keras.random.randint((2, 10), 0, 256)).shape
    (2, 10, 64)

    Reference:
        - [Akyürek et al., 2024](https://arxiv.org/abs/2401.12973), n-gram heads
    """

    def __init__(
        self, vocabulary_size, dim, orders=(2, 3, 4, 5, 6, 8), rows=2**15, **kwargs
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        check_orders(orders)
        check_size("rows", rows, PRIME)
        check_size("vocabulary_size", vocabulary_size, MAX_VOCABULARY)
        check_size("dim", dim)
        self.vocabulary_size = vocabulary_size
        self.dim = dim
        self.orders = tuple(orders)
        self.rows = rows

    def build(self, input_shape):
        self.tables = self.add_weight(
            name="embedding_tables",
            shape=(len(self.orders) * (self.vocabulary_size + 1), self.dim),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )

    def get_initial_state(self, batch_size):
        """The state before the first token.

        Returns:
            Dict of int32 tensors: the last tokens `"recent"` `(batch, max(orders))`,
            and `"followers"` `(batch, orders, rows)`; tokens count from 1, and 0 means
            no token.
        """
        return {
            "recent": ops.zeros((batch_size, max(self.orders)), "int32"),
            "followers": ops.zeros((batch_size, len(self.orders), self.rows), "int32"),
        }

    def call(self, tokens, mask=None, state=None):
        tokens = ops.cast(tokens, "int32")
        batch, length = ops.shape(tokens)[:2]
        if state is None:
            recent = ops.zeros((batch, max(self.orders)), "int32")
        else:
            recent = state["recent"]
        # Include the position before the segment: its follower is the first token.
        padded = ops.concatenate([recent, tokens + 1], axis=1)
        none = ops.zeros_like(tokens[:, :1])
        next_tokens = ops.concatenate([tokens + 1, none], axis=1)
        output = 0
        tables = []
        for i, hashes in enumerate(hashed_ngrams(padded, length + 1, self.orders)):
            hashes = hashes % self.rows
            last = _last_equal(hashes)
            found = ops.where(
                last < 0,
                0,
                ops.take_along_axis(next_tokens, ops.maximum(last, 0), axis=1),
            )[:, 1:]
            if state is not None:
                earlier = state["followers"][:, i]
                recalled = ops.take_along_axis(earlier, hashes[:, 1:], axis=1)
                found = ops.where(last[:, 1:] < 0, recalled, found)
                seen = hashes[:, :-1]
                if mask is not None:
                    # Tokens that do not exist follow no n-gram.
                    seen = ops.where(ops.cast(mask, "bool"), seen, self.rows)
                tables.append(_update_followers(earlier, seen, next_tokens[:, :-1]))
            rows = found + i * (self.vocabulary_size + 1)
            output = output + ops.take(self.tables, rows, axis=0)
        if state is None:
            return output
        followers = ops.stack(tables, axis=1)
        recent = last_tokens(padded, length, mask)
        return output, {"recent": recent, "followers": followers}

    def compute_output_spec(self, tokens, mask=None, state=None):
        output = keras.KerasTensor((*tokens.shape, self.dim), dtype=self.compute_dtype)
        return output if state is None else (output, state_spec(state))

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "dim": self.dim,
            "orders": self.orders,
            "rows": self.rows,
        }


def _sorted_positions(hashes):
    """Positions ordered by hash and, for equal hashes, by position."""
    if keras.backend.backend() == "tensorflow":
        # Its sort is not guaranteed to be stable.
        length = ops.shape(hashes)[1]
        positions = ops.arange(length, dtype="int64")
        hashes = ops.cast(hashes, "int64") * ops.cast(length, "int64") + positions
    return ops.cast(ops.argsort(hashes, axis=1), "int32")


def _last_equal(hashes):
    """For each position, the last one before it with the same hash, or −1."""
    order = _sorted_positions(hashes)
    hashes = ops.take_along_axis(hashes, order, axis=1)
    same = hashes[:, 1:] == hashes[:, :-1]
    before = ops.where(same, order[:, :-1], -1)
    before = ops.concatenate([-ops.ones_like(order[:, :1]), before], axis=1)
    return ops.take_along_axis(before, ops.argsort(order, axis=1), axis=1)


def _update_followers(followers, hashes, next_tokens):
    """`followers`, updated with a segment; for equal hashes the last counts."""
    batch, rows = ops.shape(followers)
    order = _sorted_positions(hashes)
    hashes = ops.take_along_axis(hashes, order, axis=1)
    next_tokens = ops.take_along_axis(next_tokens, order, axis=1)
    is_last = ops.concatenate(
        [hashes[:, 1:] != hashes[:, :-1], ops.ones_like(hashes[:, :1], dtype="bool")],
        axis=1,
    )
    # The others go to an additional row that is cut off.
    hashes = ops.where(is_last, hashes, rows)
    indices = ops.stack(
        [ops.broadcast_to(ops.arange(batch)[:, None], ops.shape(hashes)), hashes],
        axis=-1,
    )
    padded = ops.pad(followers, ((0, 0), (0, 1)))
    updated = ops.scatter_update(
        padded, ops.reshape(indices, (-1, 2)), ops.reshape(next_tokens, (-1,))
    )
    return updated[:, :rows]
