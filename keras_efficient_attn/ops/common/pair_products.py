"""All products of two entries of a vector."""

import math

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of


def pair_products(x):
    """Features whose dot product is `(x·y)²`.

    Every product of two entries, once, those of different ones times √2: first the
    squares, then the products of entries that are 1 apart, 2 apart, … around the end.

    Args:
        x: `(..., size)`.

    Returns:
        `(..., size·(size + 1)/2)`.
    """
    *batch, _ = shape_of(x)
    size = x.shape[-1]
    rows = size // 2 + 1
    # Laid out in rows of one more, the repeated vector is shifted by one in each row.
    repeated = ops.broadcast_to(x[..., None, :], (*batch, rows + 1, size))
    repeated = ops.reshape(repeated, (*batch, (rows + 1) * size))
    shifted = ops.reshape(repeated[..., : rows * (size + 1)], (*batch, rows, size + 1))[
        ..., :size
    ]
    products = ops.reshape(shifted * x[..., None, :], (*batch, rows * size))
    count = size * (size + 1) // 2
    weights = np.where(np.arange(count) < size, 1.0, math.sqrt(2.0))
    return products[..., :count] * ops.convert_to_tensor(weights, x.dtype)
