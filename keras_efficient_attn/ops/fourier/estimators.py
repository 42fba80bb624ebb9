"""The generalised Fourier integral estimators, of which Fourier attention is one."""

import math

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_name,
    check_positive_int,
    check_positive_number,
    check_positive_values,
)
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, sine
from keras_efficient_attn.ops.common.online_softmax import divide
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.fourier.kernel import POWERS, FourierConfig
from keras_efficient_attn.ops.fourier.tiled import fourier_sums


def kernel_integral(power: int = 4):
    """`A = ∫ (sin z / z)^power dz` over the real line, in closed form.

    ```
    A = π / (2^(n−1) (n−1)!) Σ_{k ≤ n/2} (−1)^k C(n, k) (n − 2k)^(n−1),   n = power
    ```

    π, 2π/3, 11π/20 and 151π/315 for the powers 2, 4, 6 and 8; π for 1, where the
    integral does not converge absolutely.

    Args:
        power: Positive integer. Defaults to 4.

    Returns:
        A float.

    Raises:
        ValueError: For another power.
    """
    check_positive_int("power", power)
    terms = (
        (-1) ** k * math.comb(power, k) * (power - 2 * k) ** (power - 1)
        for k in range(power // 2 + 1)
    )
    # Integers that no float holds; their quotient is one.
    return math.pi * (sum(terms) / (2 ** (power - 1) * math.factorial(power - 1)))


@symbolic
def fourier_density(points, samples, radius, power: int = 4):
    """The generalised Fourier density estimator.

    ```
    p(x) = 1/N Σ_i Π_d R_d/A φ(sin z_d / z_d),   z = R ∘ (x − samples[i])
    φ(u) = u^power
    ```

    with `A` from `kernel_integral`: of integral 1, and not negative for even powers. It
    converges to the density of the samples as `R` and `N / R^dim` grow. With
    `power=1` it is the estimator of the Fourier integral theorem.

    Args:
        points: `(num_points, dim)`, the points to estimate at.
        samples: `(num_samples, dim)`.
        radius: Positive number, or tensor of shape `(dim,)`.
        power: Positive integer. Powers other than 2, 4, 6 and 8 form the matrix of all
            pairs. Defaults to 4.

    Returns:
        `(num_points,)`.

    Raises:
        ValueError: For another power or radius, or shapes that do not agree.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.ops import fourier
    >>> samples = keras.random.normal((5000, 1))
    >>> density = fourier.fourier_density(keras.ops.zeros((1, 1)), samples, radius=5.0)

    which is near 0.399.

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206)
    """
    points, samples = _as_floats(points, samples)
    ones = ops.ones_like(samples[:, :1])
    _, totals, log_scale = _sums(points, samples, ones, radius, power)
    dim, count = points.shape[1], ops.cast(shape_of(samples)[0], totals.dtype)
    radius = ops.broadcast_to(ops.cast(radius, totals.dtype), (dim,))
    log_volume = ops.sum(ops.log(radius)) - dim * math.log(kernel_integral(power))
    return (totals * ops.exp(log_scale + log_volume) / count)[0, :, 0]


@symbolic
def fourier_regression(points, samples, targets, radius, power: int = 4):
    """The generalised Fourier regression estimator, of Nadaraya-Watson form.

    ```
    f(x) = Σ_i w_i(x) targets[i] / Σ_i w_i(x),   w_i(x) = Π_d φ(sin z_d / z_d)
    ```

    with `z` and `φ` as for `fourier_density`. With queries for points and keys for
    samples, this is Fourier attention. For odd powers weights may be negative, and
    their sum near 0.

    Args:
        points: `(num_points, dim)`, the points to estimate at.
        samples: `(num_samples, dim)`.
        targets: `(num_samples, target_dim)`.
        radius: Positive number, or tensor of shape `(dim,)`.
        power: Positive integer. Powers other than 2, 4, 6 and 8 form the matrix of all
            pairs. Defaults to 4.

    Returns:
        `(num_points, target_dim)`.

    Raises:
        ValueError: For another power or radius, or shapes that do not agree.

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206)
    """
    points, samples, targets = _as_floats(points, samples, targets)
    values, totals, _ = _sums(points, samples, targets, radius, power)
    return divide(values, totals)[0, :, 0]


@symbolic
def gaussian_regression(points, samples, targets, sigma):
    """The Nadaraya–Watson estimator with a Gaussian kernel.

    ```
    f(x) = Σ_i w_i(x) targets[i] / Σ_i w_i(x),   w_i(x) = exp(−‖x − samples[i]‖² / 2σ²)
    ```

    With queries for points, keys of one norm for samples and `σ² = √dim`, this is
    softmax attention. The matrix of all pairs is formed.

    Args:
        points: `(num_points, dim)`, the points to estimate at.
        samples: `(num_samples, dim)`.
        targets: `(num_samples, target_dim)`.
        sigma: `σ`, a positive number.

    Returns:
        `(num_points, target_dim)`.

    Raises:
        ValueError: For shapes that do not agree, or a `sigma` that is not positive.

    Reference:
        - [Nadaraya, 1964](https://doi.org/10.1137/1109020)
    """
    points, samples, targets = _as_floats(points, samples, targets)
    _check_shapes(points, samples, targets)
    check_positive_number("sigma", sigma)
    squares = sum(
        ops.square(difference) for difference in _differences(points, samples)
    )
    return ops.softmax(-squares / (2 * sigma**2), axis=-1) @ targets


def best_radius(
    num_samples: int,
    dim: int,
    estimator: str = "regression",
    scale: float = 1.0,
    moments: int = 1,
):
    """The radius at which the bounds of bias and variance balance.

    ```
    density      R = N^(1 / (dim + b)) / scale,   error N^(−b / (dim + b)),   b = m + 1
    regression   the same with b = 2m + 2
    ```

    by the theorems, for functions `φ` whose moments `∫ φ(sin z / z) zʲ dz` vanish for
    `j` from 1 to `m`, and which fall fast enough: for powers, `m` is 1, from 4
    (density) and 6 (regression) on. The errors are the mean integrated squared error
    and the mean squared error at a point. The theorems leave a constant factor of `R`
    open.

    Args:
        num_samples: `N`.
        dim: Size of a sample.
        estimator: `"density"` or `"regression"`. Defaults to `"regression"`.
        scale: Length over which the density or the function changes; about the standard
            deviation of the samples. Defaults to 1.
        moments: `m`. Defaults to 1, that of powers.

    Returns:
        A float.

    Raises:
        ValueError: For another estimator, or numbers that are not positive.

    Example:

    >>> from keras_efficient_attn.ops import fourier
    >>> fourier.best_radius(10000, 2, "density")
    10.0

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206), theorems 1 and 2
    """
    check_positive_int("num_samples", num_samples)
    check_positive_int("dim", dim)
    check_positive_int("moments", moments)
    orders = {"density": dim + moments + 1, "regression": dim + 2 * (moments + 1)}
    check_name("estimator", estimator, orders)
    check_positive_number("scale", scale)
    return num_samples ** (1 / orders[estimator]) / scale


def _as_floats(*arrays):
    """Tensors in the accumulator's dtype."""
    tensors = [ops.convert_to_tensor(x) for x in arrays]
    dtype = accumulator_dtype(*tensors)
    return [ops.cast(x, dtype) for x in tensors]


def _sums(points, samples, targets, radius, power):
    """`fourier_sums` of one row and one head."""
    check_positive_int("power", power)
    _check_shapes(points, samples, targets)
    check_positive_values("radius", radius)
    if tuple(np.shape(radius)) not in ((), (points.shape[1],)):
        raise ValueError(
            f"`radius` must be a number or have the shape {(points.shape[1],)}. "
            f"Received: radius.shape={tuple(np.shape(radius))}"
        )
    if power not in POWERS:
        return _dense_sums(points, samples, targets, radius, power)
    return fourier_sums(
        [x[None, :, None] for x in (points, samples, targets)],
        radius,
        FourierConfig(power),
    )


def _dense_sums(points, samples, targets, radius, power):
    """As `fourier_sums`, for weights of any sign."""
    radius = ops.broadcast_to(ops.cast(radius, points.dtype), (points.shape[1],))
    weights = 1.0
    for axis, difference in enumerate(_differences(points, samples)):
        z = radius[axis] * difference
        near = ops.abs(z) < 1e-6
        ratio = ops.where(near, 1.0, sine(z) / ops.where(near, 1.0, z))
        weights = weights * ratio**power
    sums = weights @ targets, ops.sum(weights, axis=-1, keepdims=True)
    values, totals = (x[None, :, None] for x in sums)
    return values, totals[..., 0], ops.zeros_like(totals[..., 0])


def _differences(points, samples):
    """Those of all pairs, `(num_points, num_samples)`, for one axis at a time."""
    for axis in range(points.shape[1]):
        yield points[:, axis, None] - samples[:, axis]


def _check_shapes(points, samples, targets):
    shapes = [tuple(x.shape) for x in (points, samples, targets)]
    if (
        any(len(shape) != 2 for shape in shapes)
        or shapes[0][1] != shapes[1][1]
        or shapes[1][0] != shapes[2][0]
    ):
        raise ValueError(
            "`points`, `samples` and `targets` must have the shapes (num_points, dim), "
            "(num_samples, dim) and (num_samples, target_dim). Received: "
            f"points.shape={shapes[0]}, samples.shape={shapes[1]}, "
            f"targets.shape={shapes[2]}"
        )
