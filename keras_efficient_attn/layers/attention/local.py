"""LocalAttention: near keys only, in a sequence or an image."""

import dataclasses
import functools
import math

import keras

from keras_efficient_attn.layers.attention.axes import SequenceAxes
from keras_efficient_attn.layers.attention.patterns import PatternAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.state import recent_keys_spec
from keras_efficient_attn.ops.local_attention.api import FORMS
from keras_efficient_attn.ops.local_attention.config import LocalConfig, local_pairs
from keras_efficient_attn.ops.local_attention.grid import GridOrder


# Checked once: equal patterns are one object. `torch.compile` traces cached functions,
# but no cached class.
@functools.lru_cache(256)
def _local_config(*arguments):
    return LocalConfig(*arguments)


@register_attention("local")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class LocalAttention(PatternAttention):
    """Softmax attention to near keys, in linear time, over sequences and images.

    A query sees these keys, and with `use_causal_mask` no later ones:

    - `window=w`: itself and `w - 1` earlier keys, exactly; not causal, as many later
      ones.
    - `query_block=n, memory=m`: its own block of `n` positions, and `m` positions
      before the block; not causal, also `m` after it.
    - `query_block=(h, w), memory=(a, b), grid=(rows, columns)`: its own rectangle of
      an image, and a halo of `a` rows above and `b` columns on the left and right;
      not causal, also `a` rows below.

    Time and memory grow linearly with the length; only blocks with visible keys are
    computed.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the normalised
            weights), `use_bias`, ….
        window: Positive integer. Defaults to `sliding_window`; to 128 if neither that
            nor `query_block` is given.
        query_block: Positive integer, or a pair of them for images.
        memory: Non-negative integer, or a pair. Defaults to `query_block`.
        grid: Rows and columns of the image, for a pair `query_block`. Defaults to the
            size of the images when the layer is built.
        grid_order: Order of an image's positions: `"raster"`, row by row (the default),
            or `"block"`, rectangle by rectangle, row by row within each.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000, along the sequence. Defaults to `None`: no positions.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`. Its
            `sliding_window` is the `window`.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`. With a
        `grid`, a sequence `(batch, length, dim)` is the image in that order, or its
        beginning; inputs `(batch, rows, columns, dim)`, with masks `(batch, rows,
        columns)`, are the image in its layout. So are the two `attention_axes` of
        inputs with more axes, such as `(2, 3)` of videos `(batch, frames, rows,
        columns, dim)`. Scores have the order of the sequence, `(batch, ..., heads,
        positions, positions)`. A masked position of a whole image keeps its place.

    Returns:
        As `EfficientAttention`; of the inputs' rank.

    Raises:
        ValueError: For arguments that define no pattern, or inputs that do not fit the
            `grid`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import LocalAttention
    >>> layer = LocalAttention(num_heads=4, key_dim=16, window=64)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> output = layer(x, x, use_causal_mask=True)
    >>> layer = LocalAttention(
    ...     num_heads=4, key_dim=16, query_block=(4, 8), memory=(4, 4)
    ... )
    >>> image = keras.random.normal((2, 20, 30, 64))
    >>> layer(image, image, use_causal_mask=True).shape
    (2, 20, 30, 64)

    Reference:
        - [Parmar et al., 2018](https://arxiv.org/abs/1802.05751)
    """

    takes_sliding_window = True

    def __init__(
        self,
        *args,
        window: int | None = None,
        query_block=None,
        memory=None,
        grid=None,
        grid_order: str = "raster",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        window = self._window_or(window)
        query_block, memory, grid = map(_pair, (query_block, memory, grid))
        self.keep(locals())
        # The shape of an image may still set the grid.
        if grid is None and self._is_grid:
            grid = (1, 1)
        LocalConfig(self.window, query_block, memory, grid, grid_order)

    @property
    def pattern_arguments(self):
        """The arguments of `ops.local_attention` and `ops.local_pattern`.

        Raises:
            ValueError: If the `grid` is not known yet.
        """
        return dataclasses.asdict(self._config())

    def build(self, query_shape, value_shape, key_shape=None):
        shapes = {"query": query_shape, "value": value_shape}
        if key_shape is not None:
            shapes["key"] = key_shape
        axes = self._axes_of(len(query_shape))
        if isinstance(axes, _ImageAxes):
            sizes = axes.image_sizes(query_shape)
            if self.grid is None and None not in sizes:
                self.grid = sizes
            self._check_images(axes, shapes)
        super().build(*shapes.values())

    @property
    def keeps_places(self):
        return self._is_grid

    @property
    def takes_documents(self):
        return not self._is_grid

    @property
    def takes_window_bias(self):
        return self.query_block is None

    def state_spec(self, batch_size, max_length):
        reach = self._config().mask_fn(causal=True).reach
        sizes = (batch_size, reach, self._num_heads, self._key_dim, self._value_dim)
        return recent_keys_spec(*sizes, self.state_dtype)

    def operations(self, length, causal):
        pairs = local_pairs(length, causal, self._config())
        per_pair = 2 * self._num_heads * (self._key_dim + self._value_dim)
        return None if pairs is None else per_pair * pairs

    def _check_call(self, query, value, key, call):
        if self._is_grid:
            for name, x in (("query", query), ("key", key)):
                shape = tuple(x.shape)
                self._config().check_length(f"{name}.shape", shape[1], shape)

    def split_reach(self, call):
        drops = call.training and self._dropout > 0.0
        exact = self.query_block is None and self.window_bias is None
        if drops or not exact:
            return None
        return self._config().window - 1

    def attend_to_pattern(self, softmax, call):
        config, window_bias = self._config(), None
        if call.split is not None:
            query, key, value, key_mask = softmax.inputs
            return call.split.local_attention(
                query,
                key,
                value,
                window=config.window,
                causal=call.causal,
                key_mask=key_mask,
            )
        if self.window_bias is not None and self.takes_window_bias:
            dtype = accumulator_dtype(*softmax.inputs[:3])
            window_bias = self._bias_of_window(config.window, call.causal, dtype)
        forms = FORMS if window_bias is None else FORMS[:3]
        return softmax.attend(config, forms, window_bias)

    def _axes_of(self, rank):
        axes = super()._axes_of(rank)
        if not self._is_grid or len(axes.axes) == 1:
            return axes
        if len(axes.axes) > 2:
            raise ValueError(
                "With a pair `query_block`, `attention_axes` must be the two axes of "
                "an image, or one axis, a sequence. Received: attention_axes="
                f"{self._sequence_axes} for inputs of rank {rank}"
            )
        return _ImageAxes(rank, axes.axes, self._order)

    def _check_inputs(self, inputs, masks, state):
        axes = self._axes_of(len(inputs[0].shape))
        if isinstance(axes, _ImageAxes):
            names = ("query", "value", "key")
            shapes = {n: x.shape for n, x in zip(names, inputs, strict=True)}
            self._check_images(axes, shapes)
        return super()._check_inputs(inputs, masks, state)

    def _config(self):
        return _local_config(
            self.window, self.query_block, self.memory, self.grid, self.grid_order
        )

    @property
    def _is_grid(self):
        return isinstance(self.query_block, tuple)

    @property
    def _order(self):
        return GridOrder(self.grid, self.query_block, self.grid_order == "block")

    def _check_images(self, axes, shapes):
        for name, shape in shapes.items():
            if len(shape) != axes.rank or axes.image_sizes(shape) != self.grid:
                raise ValueError(
                    f"`{name}` must be images of rank {axes.rank}, whose axes "
                    f"{axes.axes} have the sizes of `grid` {self.grid}. Received: "
                    f"{name}.shape={tuple(shape)}"
                )


@dataclasses.dataclass(frozen=True)
class _ImageAxes(SequenceAxes):
    """Rows and columns of images, in the order of their positions.

    Args:
        order: `GridOrder`.
    """

    order: GridOrder

    def image_sizes(self, shape):
        """Rows and columns of inputs of that shape."""
        return tuple(shape[axis] for axis in self.axes)

    def to_sequence(self, x):
        return self.order.to_steps(super().to_sequence(x))

    def from_sequence(self, x, like):
        return super().from_sequence(self.order.to_rows(x), like)

    def _scores_shape(self, queries, keys, heads):
        """Scores stay in the order of the sequence."""
        length = math.prod(self.order.grid)
        rows = (queries[axis] for axis in (0, *self.batch_axes))
        return (*rows, heads, length, length)


def _pair(argument):
    """Converts lists, which JSON configurations hold, to tuples."""
    return tuple(argument) if isinstance(argument, list) else argument
