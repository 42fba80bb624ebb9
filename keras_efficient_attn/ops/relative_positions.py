"""Relative positions in the form of Transformer-XL, inside a window."""

import numpy as np
from keras import ops


def window_distances(window, causal):
    """Distances `query position - key position` in a window, falling, as an array."""
    return np.arange(window - 1, -1 if causal else -window, -1)


def sinusoids(positions, dim, max_wavelength):
    """Sines, then cosines, of positions: a `(positions, dim)` array, `dim` even.

    Args:
        positions: Array of numbers; they may be negative.
        dim: Even number of channels.
        max_wavelength: Longest wavelength, over 2π.
    """
    frequencies = max_wavelength ** (-np.arange(dim // 2) / (dim // 2))
    angles = np.asarray(positions)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def shifted_to_keys(scores, width):
    """Scores by distance, as scores by key.

    Args:
        scores: `(..., queries, distances)`; entry `m` of query `i` belongs to key
            `i + m`.
        width: Number of keys, at least `queries + distances - 1`.

    Returns:
        `(..., queries, width)`, zero for keys that no distance leads to.
    """
    *batch, queries, distances = ops.shape(scores)
    # Rows that are one longer than `width` run ahead of rows of `width` by one a row.
    padding = [(0, 0)] * (len(batch) + 1) + [(0, width + 1 - distances)]
    scores = ops.reshape(ops.pad(scores, padding), (*batch, queries * (width + 1)))
    return ops.reshape(scores[..., : queries * width], (*batch, queries, width))
