"""Relative positions in the form of Transformer-XL."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.angles import position_angles
from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.numerics import cosine, pad, sine


def window_distances(window, causal):
    """Distances `query position - key position` in a window, in decreasing order."""
    return np.arange(window - 1, -1 if causal else -window, -1)


def wave_frequencies(number, max_wavelength):
    """Frequencies that decrease from 1 on a logarithmic scale, as an array."""
    return max_wavelength ** (-np.arange(number) / number)


def window_sinusoids(window, causal, dim, max_wavelength, dtype):
    """Sines, then cosines, of the distances in a window.

    Args:
        window, causal: As `window_distances`.
        dim: Even number of channels.
        max_wavelength: Longest wavelength, over 2π.
        dtype: Dtype of the tensor `(distances, dim)`, which is rounded only once.
    """
    if BACKEND == "torch":
        # Other backends may lack float64; `torch.compile` lacks NumPy.
        last = -1 if causal else -window
        distances = ops.arange(window - 1, last, -1, dtype="int32")
        waves = distance_sinusoids(distances, dim, max_wavelength, "float64")
        return ops.cast(waves, dtype)
    frequencies = wave_frequencies(dim // 2, max_wavelength)
    angles = window_distances(window, causal)[:, None] * frequencies
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return ops.convert_to_tensor(waves, dtype)


def shifted_to_keys(scores, width):
    """Converts scores by distance to scores by key.

    Args:
        scores: `(..., queries, distances)`; entry `m` of query `i` belongs to key
            `i + m`.
        width: Number of keys, at least `queries + distances - 1`.

    Returns:
        `(..., queries, width)`, zero for keys without a distance.
    """
    *batch, queries, distances = shape_of(scores)
    # Rows longer than `width` by one shift by one per row.
    padding = [(0, 0)] * (len(batch) + 1) + [(0, width + 1 - distances)]
    scores = ops.reshape(pad(scores, padding), (*batch, queries * (width + 1)))
    return ops.reshape(scores[..., : queries * width], (*batch, queries, width))


def bias_products(query, bias):
    """A bias of the logits by distance, as products of queries and keys.

    Args:
        query: `(batch, length, heads, dim)`.
        bias: `(distances, heads)`, or `None`.

    Returns:
        `(position_query, position_key)`, of one channel, for `attend_near`; `None` for
        no bias.
    """
    return None if bias is None else (ops.ones_like(query[..., :1]), bias[..., None])


def distance_sinusoids(distances, dim, max_wavelength, dtype):
    """Computes `window_sinusoids` for an integer tensor `(distances,)`.

    `dtype` is float32 or float64.
    """
    angles = position_angles(
        distances, wave_frequencies, dim // 2, max_wavelength, dtype=dtype
    )
    waves = ops.concatenate([sine(angles), cosine(angles)], axis=-1)
    return ops.cast(waves, dtype)


def shifted_by_query(scores, width):
    """Converts scores by distance to scores by key, for queries with shared keys.

    Args:
        scores: `(..., queries, distances)`, of distances that decrease by one; entry
            `m` of query `i` belongs to key `i + m - (queries - 1)`. There are at least
            `queries + width - 1` distances, so that each key of each query has one.
        width: Number of keys.

    Returns:
        `(..., queries, width)`.
    """
    *batch, queries, distances = shape_of(scores)
    # Each row starts one entry earlier than the row above.
    padding = [(0, 0)] * (len(batch) + 1) + [(1, 0)]
    scores = ops.reshape(pad(scores, padding), (*batch, distances + 1, queries))
    scores = ops.reshape(scores[..., 1:, :], (*batch, queries, distances))
    return scores[..., :width]
