"""Embeddings of hashed n-grams."""

import keras
from keras import ops

# A prime below 2^20, and a factor that keeps `hash * factor + token` below 2^31.
PRIME = 1_048_573
FACTOR = 2_039
MAX_VOCABULARY = 9_000_000


def check_orders(orders):
    """Raises `ValueError` if these are not lengths of n-grams."""
    if (
        not isinstance(orders, list | tuple)
        or not orders
        or not all(type(order) is int and order > 0 for order in orders)
        or len(set(orders)) < len(orders)
    ):
        raise ValueError(
            "`orders` must be a list of distinct positive integers. Received: "
            f"orders={orders!r}"
        )


def check_size(name, received, limit=None):
    """Raises `ValueError` if an argument is not an integer from 1 to `limit`."""
    if type(received) is not int or not 0 < received <= (limit or received):
        raise ValueError(
            f"`{name}` must be a positive integer"
            f"{f' of at most {limit:,}' if limit else ''}. Received: "
            f"{name}={received!r}"
        )


def state_spec(state):
    """Symbolic tensors like a state."""
    return {
        name: keras.KerasTensor(tensor.shape, dtype=tensor.dtype)
        for name, tensor in state.items()
    }


def hashed_ngrams(padded, length, orders):
    """Hashes of the n-grams that end at each of the last `length` positions.

    Args:
        padded: Integers `(batch, at least length + max(orders) - 1)`.
        length: Positions.
        orders: The lengths n.

    Returns:
        For each order, int32 `(batch, length)` below `PRIME`.
    """
    size = ops.shape(padded)[1]
    hashed, by_order = 0, {}
    for back in range(max(orders)):
        stop = size - back
        hashed = (hashed * FACTOR + padded[:, stop - length : stop]) % PRIME
        by_order[back + 1] = hashed
    return [by_order[order] for order in orders]


def last_tokens(padded, length, mask):
    """The last tokens that exist, as many as precede a segment.

    Args:
        padded: Integers `(batch, number + length)`, a segment after earlier tokens.
        length: Length of the segment.
        mask: Boolean `(batch, length)`, true and then false, or `None`.
    """
    if mask is None:
        return padded[:, length:]
    read = ops.sum(ops.cast(mask, "int32"), axis=1, keepdims=True)
    index = ops.cast(read, "int32") + ops.arange(
        ops.shape(padded)[1] - length, dtype="int32"
    )
    return ops.take_along_axis(padded, index, axis=1)


@keras.saving.register_keras_serializable(package="byte_lm")
class HashedNGrams(keras.layers.Layer):
    """The sum of embeddings of the n-grams that end at each position.

    An n-gram's hash picks a row of its order's table. A look-up is cheap compared to a
    matrix product, and a byte model's blocks need not learn spelling. The state is the
    last `max(orders) - 1` tokens.

    Args:
        dim: Width of the output.
        orders: The lengths n of the n-grams. Defaults to `(2, 3, 4, 5, 6)`.
        rows: Rows of each order's table, at most 1,048,573. Defaults to 16,384.
        width: Width of a row. Defaults to 32.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: Integers `(batch, length)`, not negative and below 9,000,000.
        mask: Optional boolean `(batch, length)`, true and then false: the tokens of a
            row that exist.
        state: Optional, from `get_initial_state` or the previous segment's call.

    Returns:
        `(batch, length, dim)`; `(output, state)` with `state`.

    Raises:
        ValueError: If `orders` are not distinct positive integers, or `rows` or
            `width` are out of range.

    Example:

    >>> layer = HashedNGrams(64, orders=(2, 3), rows=1000)
    >>> layer(keras.random.randint((2, 10), 0, 256)).shape
    (2, 10, 64)

    Reference:
        - [Pagnoni et al., 2024](https://arxiv.org/abs/2412.09871)
    """

    def __init__(self, dim, orders=(2, 3, 4, 5, 6), rows=2**14, width=32, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        check_orders(orders)
        check_size("rows", rows, PRIME)
        check_size("width", width)
        check_size("dim", dim)
        self.dim = dim
        self.orders = tuple(orders)
        self.rows = rows
        self.width = width

    def build(self, input_shape):
        self.tables = self.add_weight(
            name="embedding_tables",
            shape=(len(self.orders) * self.rows, self.width),
            initializer=keras.initializers.RandomNormal(stddev=0.05),
        )
        self.kernel = self.add_weight(
            name="kernel", shape=(len(self.orders) * self.width, self.dim)
        )

    def get_initial_state(self, batch_size):
        """The state before the first token.

        Returns:
            Dict of int32 `"recent"` `(batch, max(orders) - 1)`, the last tokens; tokens
            count from 1, and 0 means no token.
        """
        return {"recent": ops.zeros((batch_size, max(self.orders) - 1), "int32")}

    def call(self, tokens, mask=None, state=None):
        tokens = ops.cast(tokens, "int32")
        batch, length = ops.shape(tokens)[:2]
        past = (self.get_initial_state(batch) if state is None else state)["recent"]
        # 0 marks positions before the text.
        padded = ops.concatenate([past, tokens + 1], axis=1)
        indices = [
            hashes % self.rows + i * self.rows
            for i, hashes in enumerate(hashed_ngrams(padded, length, self.orders))
        ]
        vectors = ops.take(self.tables, ops.stack(indices, axis=-1), axis=0)
        vectors = ops.reshape(vectors, (batch, length, len(self.orders) * self.width))
        output = ops.matmul(vectors, self.kernel)
        if state is None:
            return output
        return output, {"recent": last_tokens(padded, length, mask)}

    def compute_output_spec(self, tokens, mask=None, state=None):
        output = keras.KerasTensor((*tokens.shape, self.dim), dtype=self.compute_dtype)
        return output if state is None else (output, state_spec(state))

    def get_config(self):
        return {
            **super().get_config(),
            "dim": self.dim,
            "orders": self.orders,
            "rows": self.rows,
            "width": self.width,
        }
