"""Codes for given keys, by k-means in the metric of the queries."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.vq_attention.codebook import (
    enough_keys,
    lloyd,
    look_up,
    nearest_codes,
    plus_plus,
)

# Least variance of queries in any direction, as a share of their mean variance.
LEAST_VARIANCE = 1e-4


def fitted(keys, moments, num_codes, iterations, seed):
    """Codes by k-means, and the coordinates in which they and keys are compared.

    In the metric of the queries a residual `δ = key − code` has the square
    `δᵀ E[q qᵀ] δ = E[(q·δ)²]`. In the coordinates found here that is the sum of the
    squares, and the residuals' are uncorrelated, the largest first: to keep the first
    r of them is to approximate `q·δ` best in expected square.

    Args:
        keys: Array `(keys, heads, dim)`.
        moments: `(heads, dim, dim)`, the sum or mean of `q qᵀ`; or `None`, for the
            Euclidean metric in the coordinates of the keys.
        num_codes: Number of codes.
        iterations: Iterations of k-means after k-means++.
        seed: Seed of the draws, or `None`.

    Returns:
        `(codes, maps, error)`: `(heads, codes, dim)` in the new coordinates; the maps
        into them of queries and of keys, each `(heads, dim, dim)` to be multiplied
        from the right (`None` without moments); and `√(Σ‖key − code‖² / Σ‖key‖²)` in
        the metric, `(heads,)`. All arrays.
    """
    dtype = keys.dtype
    if moments is not None:
        root, inverse = _roots(moments)
        keys = np.einsum("nhd,hde->nhe", keys, root, optimize=True).astype(dtype)
    random = np.random.default_rng(0 if seed is None else seed)
    keys = ops.convert_to_tensor(random.permutation(keys))
    uniforms = random.random((num_codes, keys.shape[1]))
    sample = enough_keys(keys, ops.ones_like(keys[:, 0, 0]), num_codes)
    codes = plus_plus(*sample, ops.cast(uniforms, keys.dtype))
    for _ in range(iterations):
        codes, _, _ = lloyd(keys, codes)
    residuals = keys - look_up(codes, nearest_codes(keys[None], codes))[0]
    keys, codes, residuals = (
        np.asarray(ops.convert_to_numpy(t), "float64") for t in (keys, codes, residuals)
    )
    energy = np.square(keys).sum((0, 2))
    error = np.square(residuals).sum((0, 2)) / np.where(energy > 0, energy, 1.0)
    maps = None
    if moments is not None:
        covariance = np.einsum("nhd,nhe->hde", residuals, residuals, optimize=True)
        rotation = np.linalg.eigh(covariance)[1][:, :, ::-1]
        maps = (inverse @ rotation).astype(dtype), (root @ rotation).astype(dtype)
        codes = codes @ rotation
    return codes.astype(dtype), maps, np.sqrt(error)


def _roots(moments):
    """The square roots of matrices and their inverses, `(heads, dim, dim)`.

    Scaled to a mean variance of 1, so that keys stay about as long as they are.
    """
    values, vectors = np.linalg.eigh(moments)
    mean = values.mean(-1, keepdims=True)
    # For queries of zeros every metric is as good.
    values = np.where(mean > 0, values / np.where(mean > 0, mean, 1.0), 1.0)
    roots = np.sqrt(np.maximum(values, LEAST_VARIANCE))[:, None]
    transposed = np.swapaxes(vectors, 1, 2)
    return (vectors * roots) @ transposed, (vectors / roots) @ transposed
