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

# Minimum variance of queries in any direction, relative to their mean variance.
LEAST_VARIANCE = 1e-4
# Minimum width of a soft code, relative to the keys' standard deviation.
LEAST_WIDTH = 1e-3
# Number of keys whose shares are in memory at once.
KEYS_AT_ONCE = 4096


def fit_codes(keys, moments, num_codes, iterations, seed):
    """Codes by k-means, and the coordinates in which keys are compared with them.

    In the metric of the queries a residual `δ = key − code` has the square
    `δᵀ E[q qᵀ] δ = E[(q·δ)²]`. In the coordinates found here this is the sum of the
    squares, and the residuals are uncorrelated with decreasing variance. Keeping the
    first r coordinates is the best approximation of `q·δ` in expected square.

    Args:
        keys: Array `(keys, heads, dim)`.
        moments: `(heads, dim, dim)`, the sum or mean of `q qᵀ`; or `None`, for the
            Euclidean metric in the coordinates of the keys.
        num_codes: Number of codes.
        iterations: Iterations of k-means after k-means++.
        seed: Seed of the draws, or `None`.

    Returns:
        `(codes, maps, error)`: `(heads, codes, dim)`; the maps into the new coordinates
        of queries and of keys, each `(heads, dim, dim)` to be multiplied from the right
        (`None` without moments); and `√(Σ‖key − code‖² / Σ‖key‖²)` in the metric,
        `(heads,)`. All arrays.
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
        codes = codes @ inverse
    return codes.astype(dtype), maps, np.sqrt(error)


def fit_mixture(keys, codes, sigma, learn_weights, iterations):
    """A mixture of round Gaussians, by expectation-maximisation.

    Args:
        keys: Array `(keys, heads, dim)`.
        codes: Initial codes, `(heads, codes, dim)`.
        sigma: The width of all codes, a number; `None` fits one per code.
        learn_weights: Whether to fit weights; otherwise all are equal.
        iterations: Number of updates of codes, widths and weights.

    Returns:
        `(codes, sigma, weights)`: `(heads, codes, dim)` and twice `(heads, codes)`.
    """
    codes = np.array(codes, "float64")
    heads, number, dim = codes.shape
    deviation = np.sqrt(np.maximum(keys.astype("float64").var(0).mean(-1), 1e-30))
    least = LEAST_WIDTH * deviation[:, None]
    weights = np.full((heads, number), 1.0 / number)
    widths = np.full((heads, number), sigma or 0.0)
    if sigma is None:
        nearest = np.concatenate(
            [_squares(part, codes).min(-1) for part in _parts(keys)]
        )
        widths[:] = np.maximum(np.sqrt(nearest.mean(0) / dim)[:, None], least)
    for _ in range(iterations):
        counts, sums, squares = (
            np.zeros(shape) for shape in ((heads, number), codes.shape, (heads, number))
        )
        for part in _parts(keys):
            share = _shares(part, codes, widths, weights)
            counts += share.sum(0)
            sums += np.einsum("nhc,nhd->hcd", share, part, optimize=True)
            squares += np.einsum("nhc,nh->hc", share, np.square(part).sum(-1))
        # A code without keys does not move.
        used = counts > 1e-6
        safe = np.where(used, counts, 1.0)
        codes = np.where(used[..., None], sums / safe[..., None], codes)
        if sigma is None:
            variance = (squares / safe - np.square(codes).sum(-1)) / dim
            moved = np.sqrt(np.maximum(variance, 0.0))
            widths = np.maximum(np.where(used, moved, widths), least)
        if learn_weights:
            weights = (counts + 1e-3) / (counts + 1e-3).sum(-1, keepdims=True)
    return codes, widths, weights


def _parts(keys):
    for start in range(0, len(keys), KEYS_AT_ONCE):
        yield keys[start : start + KEYS_AT_ONCE].astype("float64")


def _squares(keys, codes):
    """`‖key − code‖²`, `(keys, heads, codes)`."""
    products = np.einsum("nhd,hcd->nhc", keys, codes, optimize=True)
    norms = np.square(keys).sum(-1)[..., None] + np.square(codes).sum(-1)
    return np.maximum(norms - 2 * products, 0.0)


def _shares(keys, codes, sigma, weights):
    """`p(code | key)`, `(keys, heads, codes)`."""
    exponents = -_squares(keys, codes) / (2 * np.square(sigma)) - keys.shape[
        -1
    ] * np.log(sigma)
    exponents = exponents + np.log(weights)
    shares = np.exp(exponents - exponents.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def _roots(moments):
    """The square roots of matrices and their inverses, `(heads, dim, dim)`.

    Scaled to a mean variance of 1, so that the keys' norms stay about the same.
    """
    values, vectors = np.linalg.eigh(moments)
    mean = values.mean(-1, keepdims=True)
    # For zero queries every metric is equally good.
    values = np.where(mean > 0, values / np.where(mean > 0, mean, 1.0), 1.0)
    roots = np.sqrt(np.maximum(values, LEAST_VARIANCE))[:, None]
    transposed = np.swapaxes(vectors, 1, 2)
    return (vectors * roots) @ transposed, (vectors / roots) @ transposed
