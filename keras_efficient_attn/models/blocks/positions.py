"""Position embeddings, which stream."""

import dataclasses

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.models.options import Options
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_int, check_positive_int

POSITIONS = ("sinusoidal", "learned", "rotary")
# Longest wavelength of sinusoidal and rotary positions, over 2π.
MAX_WAVELENGTH = 10_000.0


class Positions(keras.layers.Layer):
    """Base: adds an embedding of the position to each vector.

    Args:
        max_offset: In training, positions count from a random number between 0 and
            this, the same for all rows, so that those of longer sequences are known.
            Defaults to 0.
        seed: Optional integer; layers of the same seed, called equally often, draw the
            same numbers, as those of an encoder and its decoder should.
        **kwargs: Those of `keras.layers.Layer`.

    Call arguments:
        x: `(batch, length, dim)`.
        state: Optional, from `get_initial_state` or the previous segment's call: the
            number of positions read so far, `(batch,)`, the same for all rows: what an
            integer in each row's cache can be, whatever a sampler does to the batch
            axis.

    Returns:
        A tensor of the shape of `x`; `(output, state)` with `state`.

    Raises:
        ValueError: If `max_offset` is not an integer of at least 0.
    """

    def __init__(self, max_offset=0, seed=None, **kwargs):
        super().__init__(**kwargs)
        check_int("max_offset", max_offset, 0)
        self.max_offset = max_offset
        self.seed = seed
        if max_offset:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def get_initial_state(self, batch_size):
        """The state before the first position: zeros `(batch,)`, int32."""
        return ops.zeros((batch_size,), "int32")

    def first_position(self, x, training):
        """The number of the first position of a sequence."""
        if not (self.max_offset and training):
            return 0
        return keras.random.randint(
            (), 0, self.max_offset + 1, "int32", seed=self.seed_generator
        )

    def signal(self, x, state=None, training=None):
        """What is added to `x`, which broadcasts with it, and the new state."""
        if state is None:
            return self.embed(x, self.first_position(x, training)), None
        return self.embed(x, state[0]), state + shape_of(x)[1]

    def embed(self, x, start):
        """Embeddings that broadcast with `x`, from position `start` on."""
        raise NotImplementedError

    def call(self, x, state=None, training=None):
        signal, new_state = self.signal(x, state, training)
        return x + signal if state is None else (x + signal, new_state)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        config = super().get_config()
        return {**config, "max_offset": self.max_offset, "seed": self.seed}


def sinusoids(positions, dim):
    """Sines and cosines, float32 `(*positions.shape, dim)`, of float32 positions."""
    channels = np.arange(dim)
    frequencies = MAX_WAVELENGTH ** (-(channels - channels % 2) / dim)
    # A cosine is a sine ahead by a quarter of its wavelength.
    phases = np.where(channels % 2, np.pi / 2, 0.0)
    angles = positions[..., None] * ops.convert_to_tensor(frequencies, "float32")
    return ops.sin(angles + ops.convert_to_tensor(phases, "float32"))


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SinusoidalPositions(Positions):
    """Adds sines and cosines of the position, at wavelengths from 2π to 20,000π.

    Angles are float32 whatever the compute dtype: half precision cannot tell
    position 257 from 258.

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    def embed(self, x, start):
        steps = ops.arange(shape_of(x)[1], dtype="int32") + start
        sines = sinusoids(ops.cast(steps, "float32"), x.shape[-1])
        return ops.cast(sines[None], x.dtype)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class LearnedPositions(Positions):
    """Adds a learned vector for each position.

    Args:
        max_length: Number of positions.
        max_offset: As `Positions`; the last position stays within `max_length`.
        seed: As `Positions`.
        **kwargs: Those of `keras.layers.Layer`.

    Raises:
        ValueError: If `max_length` is not a positive integer, or an input is longer.
    """

    def __init__(self, max_length, max_offset=0, seed=None, **kwargs):
        super().__init__(max_offset, seed, **kwargs)
        check_positive_int("max_length", max_length)
        self.max_length = max_length
        self.table = keras_hub.layers.PositionEmbedding(
            max_length,
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            dtype=self.dtype_policy,
            name="table",
        )

    def build(self, input_shape):
        self.table.build(input_shape)

    def first_position(self, x, training):
        start = super().first_position(x, training)
        if not (self.max_offset and training):
            return start
        return ops.minimum(start, ops.maximum(self.max_length - shape_of(x)[1], 0))

    def embed(self, x, start):
        length = x.shape[1]
        if length is not None and length > self.max_length:
            raise ValueError(
                f"There are learned positions for {self.max_length} tokens. "
                f"Received: length {length}"
            )
        return self.table(x, start_index=start)

    def get_config(self):
        return {**super().get_config(), "max_length": self.max_length}


@dataclasses.dataclass(frozen=True)
class PositionOptions(Options):
    """How a backbone knows positions.

    Args:
        kind: `"sinusoidal"`, `"learned"`, `"rotary"` (inside the attention layers), or
            `None`, the default: none but what the layers have of their own.
        max_length: Number of `"learned"` positions.
        each_layer: Whether every block adds positions to its input, a table of its own
            for `"learned"`, instead of once to the embeddings. A Universal
            Transformer has one table, and adds it in each recurrence. Defaults to
            `False`.
        max_offset: In training, positions count from a random number up to this, so
            that a model knows those of longer sequences. Defaults to 0.

    Raises:
        ValueError: For another name, or a field that does not go with it.
    """

    kind: str | None = None
    max_length: int | None = None
    each_layer: bool = False
    max_offset: int = 0

    def __post_init__(self):
        if self.kind is not None and self.kind not in POSITIONS:
            raise ValueError(
                f"`positions` must be one of {', '.join(POSITIONS)}, or None. "
                f"Received: positions={self.kind!r}"
            )
        if (self.kind == "learned") != (self.max_length is not None):
            raise ValueError(
                "`max_length` is the number of learned positions: give it for "
                "positions of this kind, and only there. Received: "
                f"kind={self.kind!r}, max_length={self.max_length!r}"
            )
        for name in ("each_layer", "max_offset"):
            if getattr(self, name) and not self.added:
                raise ValueError(
                    f"`{name}` is for the positions sinusoidal and learned. Received: "
                    f"kind={self.kind!r}, {name}={getattr(self, name)!r}"
                )

    @property
    def added(self):
        """Whether a layer adds them to vectors."""
        return self.kind in ("sinusoidal", "learned")

    def make_layer(self, seed=None, **kwargs):
        """The layer that adds these positions, or `None`.

        Args:
            seed: Of the random offset.
            **kwargs: Those of `keras.layers.Layer`.

        Raises:
            ValueError: If a length is out of range.
        """
        if self.kind == "sinusoidal":
            return SinusoidalPositions(self.max_offset, seed, **kwargs)
        if self.kind == "learned":
            return LearnedPositions(self.max_length, self.max_offset, seed, **kwargs)
        return None
