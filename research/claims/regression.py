"""Densities and functions that are estimated from samples, and the squared errors."""

import math

import numpy as np
from keras import ops

from keras_efficient_attn.ops import fourier

# For `best_radius`. With the first, bias and variance of the semicircle are equally
# large; the second is about the length over which `sin(4x)` changes.
DENSITY_SCALE, REGRESSION_SCALE = 1.5, 0.3
NOISE = 0.5
# Standard deviations of Gaussian kernels, and of the Gaussian that a Fourier kernel
# resembles near its centre.
WIDTHS = tuple(np.geomspace(0.05, 0.8, 9))
HELD_OUT, POINTS = 1000, 500


def semicircle(x):
    """The density `2/π √(1 − x²)`.

    Its Fourier transform falls as `ω^(-3/2)`, so that the squared bias falls as
    `1 / R²`, as the theorem allows; that of smooth densities falls faster.
    """
    return 2 / np.pi * np.sqrt(np.maximum(1 - x**2, 0.0))


def draw_semicircle(random, shape):
    """Coordinates of points in a disc, each of which has `semicircle` for density."""
    angle, square = random.uniform(0, 2 * np.pi, shape), random.uniform(size=shape)
    return np.sqrt(square) * np.cos(angle)


def density_error(random, size, dim):
    """The integrated squared error of `fourier_density`, of independent semicircles."""
    # The integral, by points at random.
    points = random.uniform(-1.5, 1.5, size=(400, dim))
    samples = draw_semicircle(random, (size, dim))
    radius = fourier.best_radius(size, dim, "density", DENSITY_SCALE)
    found = estimate(fourier.fourier_density, points, samples, radius=radius)
    return 3**dim * np.mean((found - semicircle(points).prod(-1)) ** 2)


def regression_error(random, size):
    """The mean squared error of `fourier_regression` of `sin(4x)`, in the interior.

    The power is 6, the least for which the theorem holds.
    """
    points = np.linspace(-0.5, 0.5, 100)[:, None]
    samples = random.uniform(-1, 1, size=(size, 1))
    targets = np.sin(4 * samples) + NOISE * random.normal(size=(size, 1))
    radius = fourier.best_radius(size, 1, scale=REGRESSION_SCALE)
    found = estimate(
        fourier.fourier_regression, points, samples, targets, radius=radius, power=6
    )
    return np.mean((found - np.sin(4 * points)) ** 2)


def estimate(estimator, *arrays, **options):
    """The estimates as an array."""
    tensors = (ops.convert_to_tensor(x.astype("float32")) for x in arrays)
    return ops.convert_to_numpy(estimator(*tensors, **options))


def fourier_kernel(*arrays, width):
    """The paper's estimator: one radius, the power 4."""
    radius = math.sqrt(3 / 4) / width
    return estimate(fourier.fourier_regression, *arrays, radius=radius, power=4)


def gaussian_kernel(*arrays, width):
    return estimate(fourier.gaussian_regression, *arrays, sigma=width)


# Each with whether the features are whitened by the covariance of the samples.
KERNELS = {
    "Fourier": (fourier_kernel, False),
    "Gaussian, isotropic": (gaussian_kernel, False),
    "Gaussian, full covariance": (gaussian_kernel, True),
    "Fourier, whitened": (fourier_kernel, True),
}
# The argument is the correlated features, or the independent factors that they sum.
FUNCTIONS = ("features", "factors")


def correlated_errors(random, size, dim, correlation):
    """The squared errors, relative to the function's variance.

    The features are normal with variance 1 and one correlation of all pairs. Samples
    have noise. Of the widths, the one with the least error on held-out samples counts;
    its error is that of other points, without noise.

    Returns:
        `(kernels, functions)`.
    """
    covariance = correlation + (1 - correlation) * np.eye(dim)
    factors = random.normal(size=(size + HELD_OUT + POINTS, dim))
    features = factors @ np.linalg.cholesky(covariance).T
    exact = np.stack([np.sin(2 * x).sum(-1) for x in (features, factors)], axis=-1)
    targets = exact + NOISE * random.normal(size=exact.shape)
    root = np.linalg.cholesky(np.atleast_2d(np.cov(features[:size].T)))
    white = np.linalg.solve(root, features.T).T
    errors = []
    for kernel, whitened in KERNELS.values():
        x = white if whitened else features
        held_out, points = [], []
        for width in WIDTHS:
            found = kernel(x[size:], x[:size], targets[:size], width=width)
            parts = np.split(found, [HELD_OUT])
            held_out.append(np.mean((parts[0] - targets[size:-POINTS]) ** 2, axis=0))
            points.append(np.mean((parts[1] - exact[-POINTS:]) ** 2, axis=0))
        best = np.argmin(held_out, axis=0)
        errors.append(np.take_along_axis(np.array(points), best[None], axis=0)[0])
    return np.array(errors) / exact[-POINTS:].var(axis=0)
