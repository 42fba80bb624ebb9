"""LocalAttention: near keys only, in a sequence or an image."""

import dataclasses

import keras
from keras import ops

from keras_efficient_attn.layers.attention.patterns import PatternAttention
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.local_attention.api import (
    local_attention,
    local_attention_at,
    local_attention_state,
)
from keras_efficient_attn.ops.local_attention.config import LocalConfig
from keras_efficient_attn.ops.local_attention.grid import generation_order, reordered


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class LocalAttention(PatternAttention):
    """Softmax attention to near keys, in linear time, over sequences and images.

    What a query sees, and with `use_causal_mask` only as far as it comes before the
    query or is the query's own position:

    - `window=w`: itself and `w - 1` earlier keys, exactly; not causal, as many later
      ones.
    - `query_block=n, memory=m`: its own block of `n` positions, and `m` positions
      before the block; not causal, also `m` after it.
    - `query_block=(h, w), memory=(a, b), grid=(rows, columns)`: its own rectangle of
      an image, and a halo of `a` rows above and `b` columns on the left and right;
      not causal, also `a` rows below.

    Time and memory grow linearly with the length; only blocks that a query sees keys
    of are computed.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the normalised
            weights), `use_bias`, ….
        window: Positive integer. Defaults to 128 without `query_block`.
        query_block: Positive integer, or a pair of them for images.
        memory: Integer that is not negative, or a pair. Defaults to `query_block`.
        grid: Rows and columns of the image, for a pair `query_block`. Defaults to
            those of a `(batch, rows, columns, dim)` input, when the layer is built.
        order: The order in which an image grows: `"raster"`, row by row (the
            default), or `"block"`, rectangle by rectangle and row by row in each.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000, along the sequence. Defaults to `None`: no positions.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`. With a `grid`, a
        sequence `(batch, length, dim)` is the image in the order in which it grows, or
        the beginning of it; inputs `(batch, rows, columns, dim)`, with masks
        `(batch, rows, columns)`, are the image as it stands. Scores have the order of
        the sequence.

    Returns:
        As `EfficientAttention`; of the inputs' rank.

    Raises:
        ValueError: For arguments that make no pattern, or inputs that do not fit in
            the `grid`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import LocalAttention
    >>> layer = LocalAttention(num_heads=4, key_dim=16, window=64)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer(x, x, use_causal_mask=True).shape
    (2, 1000, 64)
    >>> layer = LocalAttention(4, 16, query_block=(4, 8), memory=(4, 4))
    >>> image = keras.random.normal((2, 20, 30, 64))
    >>> layer(image, image, use_causal_mask=True).shape
    (2, 20, 30, 64)

    Reference:
        - [Parmar et al., 2018](https://arxiv.org/abs/1802.05751)
    """

    def __init__(
        self,
        *args,
        window=None,
        query_block=None,
        memory=None,
        grid=None,
        order="raster",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.window = window
        self.query_block = _pair(query_block)
        self.memory = _pair(memory)
        self.grid = _pair(grid)
        self.order = order
        # The shape of an image may still tell the grid.
        if grid is None and self._is_grid:
            grid = (1, 1)
        LocalConfig(window, query_block, memory, grid, order)

    @property
    def pattern_arguments(self):
        """The arguments of `ops.local_attention` and `ops.local_pattern`.

        Raises:
            ValueError: If the `grid` is not known yet.
        """
        return dataclasses.asdict(self._pattern)

    @property
    def _pattern(self):
        return LocalConfig(
            self.window, self.query_block, self.memory, self.grid, self.order
        )

    def build(self, query_shape, value_shape, key_shape=None):
        shapes = {"query": query_shape, "value": value_shape}
        if key_shape is not None:
            shapes["key"] = key_shape
        if self._is_grid and len(query_shape) == 4:
            if self.grid is None and None not in query_shape[1:3]:
                self.grid = tuple(query_shape[1:3])
            self._check_images(shapes)
            shapes = {n: _flat_shape(shape) for n, shape in shapes.items()}
        super().build(*shapes.values())

    @property
    def state_names(self):
        return ("key", "value", "mask", "position")

    def initial_state(self, batch_size):
        return local_attention_state(
            batch_size,
            self._num_heads,
            self._key_dim,
            self._value_dim,
            dtype=self._state_dtype,
            **self.pattern_arguments,
        )

    def attend_to_pattern(self, query, key, value, **arguments):
        return local_attention(query, key, value, **self.pattern_arguments, **arguments)

    def attend_at(self, position, query, key, value, key_mask):
        if self._is_grid or query.shape[1] != 1:
            return super().attend_at(position, query, key, value, key_mask)
        dtype = accumulator_dtype(query, key, value)
        query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
        if self.rotary_wavelength is not None:
            start = ops.reshape(ops.cast(position, "int32"), (1,))
            query, key = self._rotate(query, start), self._rotate(key, None)
        return local_attention_at(position, query, key, value, key_mask, self._pattern)

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
    ):
        arguments = dict(
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
            state=state,
        )
        inputs = (query, value, key, query_mask, value_mask, key_mask)
        if not (self._is_grid and len(query.shape) == 4):
            return super().call(*inputs, **arguments)
        names = ("query", "value", "key")
        images = zip(names, inputs, strict=False)
        self._check_images({n: x.shape for n, x in images if x is not None})
        inputs = (x if x is None else self._as_sequence(x) for x in inputs)
        output = super().call(*inputs, **arguments)
        if isinstance(output, tuple):
            return self._as_image(output[0]), *output[1:]
        return self._as_image(output)

    def compute_output_shape(self, query_shape, value_shape, key_shape=None):
        if not (self._is_grid and len(query_shape) == 4):
            return super().compute_output_shape(query_shape, value_shape, key_shape)
        shapes = (query_shape, value_shape, key_shape)
        flat = (shape and _flat_shape(shape) for shape in shapes)
        return (*query_shape[:3], super().compute_output_shape(*flat)[-1])

    def compute_output_spec(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        **arguments,
    ):
        inputs = (query, value, key, query_mask, value_mask, key_mask)
        if not (self._is_grid and len(query.shape) == 4):
            return super().compute_output_spec(*inputs, **arguments)
        flat = (
            x if x is None else keras.KerasTensor(_flat_shape(x.shape), dtype=x.dtype)
            for x in inputs
        )
        spec = super().compute_output_spec(*flat, **arguments)
        output, *rest = spec if isinstance(spec, tuple) else (spec,)
        shape = (*query.shape[:3], output.shape[-1])
        output = keras.KerasTensor(shape, dtype=output.dtype)
        return (output, *rest) if rest else output

    def get_config(self):
        return {
            **super().get_config(),
            "window": self.window,
            "query_block": self.query_block,
            "memory": self.memory,
            "grid": self.grid,
            "order": self.order,
        }

    @property
    def _is_grid(self):
        return isinstance(self.query_block, tuple)

    @property
    def _order(self):
        return generation_order(self.grid, self.query_block, self.order == "block")

    def _check_images(self, shapes):
        for name, shape in shapes.items():
            if len(shape) != 4 or tuple(shape[1:3]) != self.grid:
                raise ValueError(
                    f"`{name}` must be images (batch, *grid, dim), with `grid` "
                    f"{self.grid}. Received: {name}.shape={tuple(shape)}"
                )

    def _as_sequence(self, x):
        """`(batch, rows, columns, ...)` in the order in which the image grows."""
        batch, rows, columns, *tail = ops.shape(x)
        x = ops.reshape(x, (batch, rows * columns, *tail))
        return reordered(x, self._order)

    def _as_image(self, x):
        batch, _, *tail = ops.shape(x)
        x = reordered(x, self._order.argsort())
        return ops.reshape(x, (batch, *self.grid, *tail))


def _pair(argument):
    """Lists as tuples, which configurations from JSON may hold."""
    return tuple(argument) if isinstance(argument, list) else argument


def _flat_shape(shape):
    """`(batch, rows, columns, ...)` as `(batch, rows · columns, ...)`."""
    batch, rows, columns, *tail = shape
    return (batch, rows * columns, *tail)
