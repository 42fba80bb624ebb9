"""The generalised Fourier integral estimators, of which Fourier attention is one."""

import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.online_softmax import divided
from keras_efficient_attn.ops.fourier.config import FourierConfig
from keras_efficient_attn.ops.fourier.kernel import check_power
from keras_efficient_attn.ops.fourier.tiled import fourier_sums


def kernel_integral(power=4):
    """`A = ∫ (sin z / z)^power dz` over the real line, in closed form.

    ```
    A = π / (2^(n−1) (n−1)!) Σ_{k ≤ n/2} (−1)^k C(n, k) (n − 2k)^(n−1),   n = power
    ```

    π, 2π/3, 11π/20 and 151π/315 for the powers 2, 4, 6 and 8.

    Args:
        power: 2, 4, 6 or 8. Defaults to 4.

    Returns:
        A float.

    Raises:
        ValueError: For another power.
    """
    check_power(power)
    terms = (
        (-1) ** k * math.comb(power, k) * (power - 2 * k) ** (power - 1)
        for k in range(power // 2 + 1)
    )
    return math.pi * sum(terms) / (2 ** (power - 1) * math.factorial(power - 1))


def fourier_density(points, samples, radius, power=4):
    """The generalised Fourier density estimator.

    ```
    p(x) = 1/N Σ_i Π_d R_d/A φ(sin z_d / z_d),   z = R ∘ (x − samples[i])
    φ(u) = u^power
    ```

    with `A` from `kernel_integral`: non-negative, and of integral 1. It converges to
    the density of the samples as `R` and `N / R^dim` grow.

    Args:
        points: `(num_points, dim)`, where to estimate.
        samples: `(num_samples, dim)`.
        radius: Positive number, or tensor of shape `(dim,)`.
        power: 2, 4, 6 or 8. Defaults to 4.

    Returns:
        `(num_points,)`.

    Raises:
        ValueError: For another power, or shapes that do not agree.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.ops import fourier
    >>> samples = keras.random.normal((5000, 1))
    >>> density = fourier.fourier_density(keras.ops.zeros((1, 1)), samples, radius=5.0)

    which is near 0.399.

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206)
    """
    points, samples = (ops.convert_to_tensor(x) for x in (points, samples))
    ones = ops.ones_like(samples[:, :1])
    _, totals, log_scale = _sums(points, samples, ones, radius, power)
    dim, count = points.shape[1], ops.cast(shape_of(samples)[0], totals.dtype)
    radius = ops.broadcast_to(ops.cast(radius, totals.dtype), (dim,))
    log_volume = ops.sum(ops.log(radius)) - dim * math.log(kernel_integral(power))
    return (totals * ops.exp(log_scale + log_volume) / count)[0, :, 0]


def fourier_regression(points, samples, targets, radius, power=4):
    """The generalised Fourier regression estimator, of Nadaraya-Watson form.

    ```
    f(x) = Σ_i w_i(x) targets[i] / Σ_i w_i(x),   w_i(x) = Π_d φ(sin z_d / z_d)
    ```

    with `z` and `φ` as for `fourier_density`. With queries for points and keys for
    samples, this is Fourier attention.

    Args:
        points: `(num_points, dim)`, where to estimate.
        samples: `(num_samples, dim)`.
        targets: `(num_samples, target_dim)`.
        radius: Positive number, or tensor of shape `(dim,)`.
        power: 2, 4, 6 or 8. Defaults to 4.

    Returns:
        `(num_points, target_dim)`.

    Raises:
        ValueError: For another power, or shapes that do not agree.

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206)
    """
    points, samples, targets = (
        ops.convert_to_tensor(x) for x in (points, samples, targets)
    )
    values, totals, _ = _sums(points, samples, targets, radius, power)
    return divided(values, totals)[0, :, 0]


def _sums(points, samples, targets, radius, power):
    """`fourier_sums` of one row and one head."""
    config = FourierConfig(power)
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
    return fourier_sums(
        *(x[None, :, None] for x in (points, samples, targets)),
        radius,
        config,
    )
