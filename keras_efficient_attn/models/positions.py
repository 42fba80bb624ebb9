"""Position embeddings, which stream."""

import keras
import keras_hub
import numpy as np
from keras import ops

POSITIONS = ("sinusoidal", "learned", "rotary")
# Longest wavelength of sinusoidal and rotary positions, over 2π.
MAX_WAVELENGTH = 10_000.0


class Positions(keras.layers.Layer):
    """Base: adds an embedding of the position to each vector.

    The state is the number of positions read so far, `(batch,)`, the same for all
    rows: what an integer in each row's cache can be, whatever the sampler does to
    the batch axis.

    Call arguments:
        x: `(batch, length, dim)`.
        state: Optional, from `initial_state` or the previous segment's call.

    Returns:
        A tensor of the shape of `x`; `(output, state)` with `state`.
    """

    def initial_state(self, batch_size):
        """The state before the first position: zeros `(batch,)`, int32."""
        return ops.zeros((batch_size,), "int32")

    def embed(self, x, start):
        """Embeddings that broadcast with `x`, from position `start` on."""
        raise NotImplementedError

    def call(self, x, state=None):
        if state is None:
            return x + self.embed(x, 0)
        return x + self.embed(x, state[0]), state + ops.shape(x)[1]

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SinusoidalPositions(Positions):
    """Adds sines and cosines of the position, at wavelengths from 2π to 20,000π.

    Angles are float32 whatever the compute dtype: half precision cannot tell
    position 257 from 258.

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
    """

    def embed(self, x, start):
        dim = x.shape[-1]
        channels = np.arange(dim)
        frequencies = MAX_WAVELENGTH ** (-(channels - channels % 2) / dim)
        # A cosine is a sine ahead by a quarter of its wavelength.
        phases = np.where(channels % 2, np.pi / 2, 0.0)
        steps = ops.cast(ops.arange(ops.shape(x)[1], dtype="int32") + start, "float32")
        angles = steps[:, None] * ops.convert_to_tensor(frequencies, "float32")
        sines = ops.sin(angles + ops.convert_to_tensor(phases, "float32"))
        return ops.cast(sines[None], x.dtype)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class LearnedPositions(Positions):
    """Adds a learned vector for each position.

    Args:
        max_length: Number of positions.
        **kwargs: Those of `keras.layers.Layer`.

    Raises:
        ValueError: If an input is longer than `max_length`.
    """

    def __init__(self, max_length, **kwargs):
        super().__init__(**kwargs)
        self.max_length = max_length
        self.table = keras_hub.layers.PositionEmbedding(
            max_length,
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            dtype=self.dtype_policy,
            name="table",
        )

    def build(self, input_shape):
        self.table.build(input_shape)

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


def get_positions(positions, max_length=None, **kwargs):
    """The layer that adds positions to embeddings, or `None`.

    Args:
        positions: `"sinusoidal"`, `"learned"`; `"rotary"` and `None` need no layer.
        max_length: Number of learned positions.
        **kwargs: Those of `keras.layers.Layer`.

    Raises:
        ValueError: For another name, or without `max_length` for `"learned"`, or
            with it for others.
    """
    if positions is not None and positions not in POSITIONS:
        raise ValueError(
            f"`positions` must be one of {', '.join(POSITIONS)}, or None. Received: "
            f"positions={positions!r}"
        )
    if (positions == "learned") != (max_length is not None):
        raise ValueError(
            "`max_sequence_length` is the number of learned positions: give it for "
            "positions='learned', and only there. Received: "
            f"positions={positions!r}, max_sequence_length={max_length!r}"
        )
    if positions == "sinusoidal":
        return SinusoidalPositions(**kwargs)
    if positions == "learned":
        return LearnedPositions(max_length, **kwargs)
    return None
