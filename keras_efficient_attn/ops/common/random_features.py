"""Random projections for feature maps."""

import math

from keras import ops

from keras_efficient_attn.ops.common.checks import check_name
from keras_efficient_attn.ops.common.random import normal

ROW_NORMS = ("chi", "sqrt_dim")


def default_num_features(dim):
    """max(256, d ln d): enough random features for a head of size `dim`."""
    return max(256, math.ceil(dim * math.log(dim)))


def gaussian_blocks(num_features, dim, seed):
    """Standard normal draws for `random_projection`.

    Args:
        num_features: Rows of the projection.
        dim: Columns of the projection.
        seed: int or `keras.random.SeedGenerator`.

    Returns:
        `(directions, norms)`: `(blocks, dim, dim)` with enough blocks for all rows,
        and `(num_features, dim)`.
    """
    blocks = -(-num_features // dim)
    draws = normal((blocks * dim + num_features, dim), seed)
    directions = ops.reshape(draws[: blocks * dim], (blocks, dim, dim))
    return directions, draws[blocks * dim :]


def random_projection(directions, norms, orthogonal=True, row_norm="chi"):
    """A `(num_features, dim)` projection whose rows are each N(0, I).

    Args:
        directions, norms: Draws from `gaussian_blocks`.
        orthogonal: Whether the rows within each block of `dim` are orthogonal
            (uniformly distributed, by QR with the sign correction). Defaults to
            `True`.
        row_norm: `"chi"` (the default): norms of Gaussian vectors, the unbiased
            estimator. `"sqrt_dim"`: every norm is √dim, biased, with less variance.

    Raises:
        ValueError: For another `row_norm`.

    Reference:
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    """
    check_name("row_norm", row_norm, ROW_NORMS)
    num_features, dim = norms.shape
    if orthogonal:
        q, r = ops.qr(directions)
        signs = ops.sign(ops.diagonal(r, axis1=-2, axis2=-1))
        directions = ops.swapaxes(q * signs[:, None, :], -1, -2)
    rows = ops.reshape(directions, (-1, dim))[:num_features]
    unit = rows / ops.norm(rows, axis=-1, keepdims=True)
    if row_norm == "sqrt_dim":
        return unit * math.sqrt(dim)
    return unit * ops.norm(norms, axis=-1, keepdims=True)
