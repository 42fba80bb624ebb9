"""Position embeddings that support streaming."""

import dataclasses
import math

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.layers.arguments import (
    KeepsArguments,
    spec_with_state,
)
from keras_efficient_attn.layers.keras_internals import implicit_mask
from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_int, check_positive_int
from keras_efficient_attn.ops.common.documents import Documents
from keras_efficient_attn.ops.common.numerics import sine, wide_dtype
from keras_efficient_attn.ops.common.positions import position_angles
from keras_efficient_attn.ops.common.rows import (
    RowOrder,
    row_lengths,
    running_count,
)

POSITIONS = ("sinusoidal", "learned", "axial", "rotary")
# Longest wavelength of sinusoidal and rotary positions, over 2π.
MAX_WAVELENGTH = 10_000.0


class Positions(KeepsArguments, keras.layers.Layer):
    """Base: adds an embedding of the position to each vector.

    Args:
        max_offset: In training, positions count from a random number between 0 and
            this, the same for all rows, so that the model also sees positions of longer
            sequences. Defaults to 0.
        seed: Optional integer; layers with the same seed that are called equally often
            draw the same numbers, as an encoder and its decoder should.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        mask: Optional boolean `(batch, length)`: positions that are false do not count.
        state: Optional, from `get_initial_state` or the previous segment's call: the
            number of positions that each row has read, `(batch,)`.
        document_ids: Optional integers `(batch, length)`, without a `state`: positions
            count anew where they change.

    Returns:
        A tensor of the shape of `x`; `(output, state)` with `state`.

    Raises:
        ValueError: If `max_offset` is not an integer of at least 0.
    """

    # Number of positions, if limited.
    max_length = None

    def __init__(self, max_offset=0, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        check_int("max_offset", max_offset, 0)
        self.keep(locals())
        if max_offset:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def get_initial_state(self, batch_size):
        """The state before the first position: zeros `(batch,)`, int32."""
        return ops.zeros((batch_size,), "int32")

    def first_position(self, x, training):
        """The number of the first position of a sequence."""
        if not (self.max_offset and training):
            return 0
        start = keras.random.randint(
            (), 0, self.max_offset + 1, "int32", seed=self.seed_generator
        )
        if self.max_length is None:
            return start
        # The last position must exist as well.
        return ops.minimum(start, ops.maximum(self.max_length - shape_of(x)[1], 0))

    def signal(self, x, mask=None, state=None, training=None, document_ids=None):
        """The signal to add to `x`, which broadcasts with it, and the new state."""
        length = shape_of(x)[1]
        if document_ids is not None:
            order = None if mask is None else RowOrder.of(mask)
            index = Documents.of(document_ids, order).position
            index = index if order is None else order.to_places(index)
            return self.embed(x, index + self.first_position(x, training)), None
        # Segments of a stream may end with padding beyond the last position.
        if self.max_length is not None and state is None:
            check_length(x, self.max_length)
        index = ops.arange(length, dtype="int32")[None]
        if mask is not None:
            index = ops.maximum(running_count(mask) - 1, 0)
        if state is None:
            return self.embed(x, index + self.first_position(x, training)), None
        new_state = state + (length if mask is None else row_lengths(mask))
        return self.embed(x, index + state[:, None]), new_state

    def embed(self, x, index):
        """Embeddings that broadcast with `x`.

        Args:
            x: `(batch, length, dim)`.
            index: Positions, int32 `(1 or batch, length)`.
        """
        raise NotImplementedError

    def call(self, x, mask=None, state=None, training=None, document_ids=None):
        mask = implicit_mask(x) if mask is None else mask
        signal, new_state = self.signal(x, mask, state, training, document_ids)
        return x + signal if state is None else (x + signal, new_state)

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_output_spec(
        self, x, mask=None, state=None, training=None, document_ids=None
    ):
        output = keras.KerasTensor(x.shape, dtype=self.compute_dtype)
        return spec_with_state(output, state)


def sinusoids(positions, dim, dtype):
    """Sines and cosines of integers, `(*positions.shape, dim)`.

    Angles are float32 or wider whatever the dtype: half precision cannot tell position
    257 from 258.
    """
    wide = wide_dtype(dtype)
    angles = position_angles(positions, _frequencies, dim, dtype=wide)
    # A cosine is a sine shifted by a quarter of its wavelength.
    phases = np.where(np.arange(dim) % 2, np.pi / 2, 0.0)
    return ops.cast(sine(angles + ops.convert_to_tensor(phases, wide)), dtype)


def _frequencies(dim):
    """The frequency of each channel, the same for a sine and the next cosine."""
    channels = np.arange(dim)
    return MAX_WAVELENGTH ** (-(channels - channels % 2) / dim)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SinusoidalPositions(Positions):
    """Adds sines and cosines of the position, at wavelengths from 2π to 20,000π.

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    def embed(self, x, index):
        return sinusoids(index, x.shape[-1], self.compute_dtype)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class LearnedPositions(Positions):
    """Adds a learned vector for each position.

    Args:
        max_length: Number of positions.
        max_offset: As for `Positions`; the last position stays within `max_length`.
        seed: As for `Positions`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Returns:
        As `Positions`; NaN from `max_length` on, which a stream can reach.

    Raises:
        ValueError: If `max_length` is not a positive integer, or an input is longer.
    """

    def __init__(
        self, max_length, max_offset: int = 0, seed: int | None = None, **kwargs
    ):
        super().__init__(max_offset, seed, **kwargs)
        check_positive_int("max_length", max_length)
        self.keep(locals())
        self.table = keras_hub.layers.PositionEmbedding(
            max_length,
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            dtype=self.dtype_policy,
            name="table",
        )

    def build(self, input_shape):
        self.table.build(input_shape)

    def embed(self, x, index):
        within = ops.minimum(index, self.max_length - 1)
        signal = self.table(x, positions=within)
        return nan_from(self.max_length, index, signal)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class AxialPositions(Positions):
    """Adds a learned vector for each coordinate of the position in a grid.

    Position `t` of a grid `(rows, columns)` has row `t // columns` and column `t %
    columns`; a grid `(rows, columns, channels)` also has a channel.

    Args:
        shape: Sizes of the grid, two or more; their product is the number of positions.
        widths: Vector sizes per axis; the vectors are concatenated to the full width,
            as in Reformer. Defaults to `None`: the vectors are as wide as the inputs
            and are added, as in Sparse Transformer.
        max_offset: As for `Positions`; the last position stays within the grid.
        seed: As for `Positions`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Returns:
        As `Positions`; NaN beyond the grid, which a stream can reach.

    Raises:
        ValueError: If `shape` or `widths` are not as above, or an input is longer.

    Reference:
        - [Child et al., 2019](https://arxiv.org/abs/1904.10509)
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """

    def __init__(
        self, shape, widths=None, max_offset: int = 0, seed: int | None = None, **kwargs
    ):
        super().__init__(max_offset, seed, **kwargs)
        check_axes(shape, widths)
        shape, widths = tuple(shape), widths and tuple(widths)
        self.keep(locals())
        self.max_length = math.prod(self.shape)

    def build(self, input_shape):
        dim = input_shape[-1]
        widths = self.widths or [dim] * len(self.shape)
        if self.widths and sum(widths) != dim:
            raise ValueError(
                "`widths` of axial positions must add up to the width of the inputs. "
                f"Received: widths={self.widths}, width {dim}"
            )
        self.tables = [
            self.add_weight(
                name=f"axis_{axis}",
                shape=(size, width),
                initializer=keras.initializers.RandomNormal(stddev=0.02),
            )
            for axis, (size, width) in enumerate(zip(self.shape, widths, strict=True))
        ]

    def embed(self, x, index):
        positions, parts = index, []
        for size, table in zip(self.shape[::-1], self.tables[::-1], strict=True):
            parts.append(ops.take(ops.convert_to_tensor(table), index % size, axis=0))
            index = index // size
        joined = sum(parts) if self.widths is None else ops.concatenate(parts[::-1], -1)
        signal = ops.cast(joined, x.dtype)
        return nan_from(self.max_length, positions, signal)


def check_axes(shape, widths):
    """Raises `ValueError` unless these are the sizes of `AxialPositions`."""
    for name, sizes in (("shape", shape), ("widths", widths)):
        if name == "widths" and sizes is None:
            continue
        if not isinstance(sizes, list | tuple) or len(sizes) < 2:
            raise ValueError(
                f"`{name}` of axial positions must be a list of at least two positive "
                f"integers. Received: {name}={sizes!r}"
            )
        for size in sizes:
            check_positive_int(name, size)
    if widths is not None and len(widths) != len(shape):
        raise ValueError(
            "`widths` of axial positions must be as many as the sizes in `shape`. "
            f"Received: shape={shape!r}, widths={widths!r}"
        )


def nan_from(max_length, positions, signal):
    """`signal` `(batch, length, dim)`, NaN at the positions that there are not."""
    known = (positions < max_length)[..., None]
    return ops.where(known, signal, ops.cast(float("nan"), signal.dtype))


def check_length(x, max_length):
    """Raises `ValueError` for an input beyond the learned positions."""
    length = x.shape[1]
    if length is not None and length > max_length:
        raise ValueError(
            f"The inputs must have at most {max_length} tokens, the number of learned "
            f"positions. Received: length {length}"
        )


@dataclasses.dataclass(frozen=True)
class PositionOptions(Options):
    """The positions of a backbone.

    Args:
        kind: `"sinusoidal"`, `"learned"`, `"axial"` (learned per grid coordinate:
            `AxialPositions`), `"rotary"` (inside the attention layers), or `None` (the
            default): only the layers' own positions, if any.
        max_length: Number of `"learned"` positions.
        each_layer: Whether every block adds positions to its input (with its own table
            for `"learned"`), instead of once to the embeddings. A Universal Transformer
            has one table and adds it in each recurrence. Defaults to `False`.
        max_offset: In training, positions count from a random number up to this, so
            that a model also sees positions of longer sequences. Defaults to 0.
        shape, widths: As for `AxialPositions`, for `"axial"` positions.

    Raises:
        ValueError: For an unknown `kind`, or a field that does not apply to it.
    """

    kind: str | None = None
    max_length: int | None = None
    each_layer: bool = False
    max_offset: int = 0
    shape: tuple | None = None
    widths: tuple | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.kind is not None and self.kind not in POSITIONS:
            raise ValueError(
                f"`positions` must be one of {', '.join(POSITIONS)}, or None. "
                f"Received: positions={self.kind!r}"
            )
        if (self.kind == "learned") != (self.max_length is not None):
            raise ValueError(
                "`max_length`, the number of learned positions, must be given with "
                f"kind='learned', and only then. Received: kind={self.kind!r}, "
                f"max_length={self.max_length!r}"
            )
        if self.kind == "axial":
            check_axes(self.shape, self.widths)
        elif self.shape is not None or self.widths is not None:
            raise ValueError(
                "`shape` and `widths` need kind='axial'. Received: "
                f"kind={self.kind!r}, shape={self.shape!r}, widths={self.widths!r}"
            )
        for name in ("each_layer", "max_offset"):
            if getattr(self, name) and not self.is_added:
                raise ValueError(
                    f"`{name}` needs kind='sinusoidal', 'learned' or 'axial'. "
                    f"Received: kind={self.kind!r}, {name}={getattr(self, name)!r}"
                )

    @property
    def is_added(self):
        """Whether a layer adds these positions to vectors."""
        return self.kind not in (None, "rotary")

    @property
    def limit(self):
        """The number of positions, or `None` for any."""
        return math.prod(self.shape) if self.kind == "axial" else self.max_length

    def make_layer(self, seed=None, **kwargs):
        """The layer that adds these positions, or `None`.

        Args:
            seed: Seed of the random offset.
            **kwargs: Arguments of `keras.layers.Layer`.

        Raises:
            ValueError: If a length is out of range.
        """
        if self.kind == "sinusoidal":
            return SinusoidalPositions(self.max_offset, seed, **kwargs)
        if self.kind == "learned":
            return LearnedPositions(self.max_length, self.max_offset, seed, **kwargs)
        if self.kind == "axial":
            sizes = self.shape, self.widths
            return AxialPositions(*sizes, self.max_offset, seed, **kwargs)
        return None
