"""All pairwise products of a vector's entries."""

import math

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.constants import constant


def pair_products(x):
    """Features whose dot product is `(x·y)²`.

    Every product of two entries once, times √2 if they differ: first the squares, then
    the products of entries at cyclic distance 1, 2, ….

    Args:
        x: `(..., size)`.

    Returns:
        `(..., size·(size + 1)/2)`.
    """
    *batch, _ = shape_of(x)
    size = x.shape[-1]
    rows = size // 2 + 1
    # In rows longer by one, the repeated vector shifts by one per row.
    repeated = ops.broadcast_to(x[..., None, :], (*batch, rows + 1, size))
    repeated = ops.reshape(repeated, (*batch, (rows + 1) * size))
    shifted = ops.reshape(repeated[..., : rows * (size + 1)], (*batch, rows, size + 1))[
        ..., :size
    ]
    products = ops.reshape(shifted * x[..., None, :], (*batch, rows * size))
    weights = constant(_weights, size, dtype=x.dtype)
    return products[..., : weights.shape[0]] * weights


def _weights(size):
    """1 for the squares, which come first, and √2 for the other products."""
    return np.where(np.arange(size * (size + 1) // 2) < size, 1.0, math.sqrt(2.0))
