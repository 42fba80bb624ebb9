"""Random features of the Fourier kernel, for linear attention.

`Π_d sinc(z_d)^h` is the characteristic function of a sum of `h` uniform numbers on
[−1, 1] per dimension, so it is the mean of `cos(ω·z)` over such frequencies `ω`. The
kernel of power `2h` is its square. The square of an estimate is never negative; a
direct estimate of the kernel could be where the kernel is small. The square is again
linear attention, with products of features.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.numerics import cosine, sine
from keras_efficient_attn.ops.common.pair_products import pair_products
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.fourier.kernel import check_power


def kernel_frequencies(
    num_frequencies, dim, power: int = 4, orthogonal: bool = True, seed=None
):
    """Frequencies `ω` for `squared_features`, for queries and keys times the radius.

    They are drawn from the kernel's distribution, `E[cos(ω·z)] = Π_d
    sinc(z_d)^(power/2)`.

    Args:
        num_frequencies: `M`, number of frequencies.
        dim: Size of the queries and keys.
        power: 2, 4, 6 or 8. Defaults to 4.
        orthogonal: Whether the draws, as a matrix, are replaced by the nearest matrix
            with orthogonal rows of the length `√(dim · power / 6)` or, for `M` beyond
            `dim`, with orthogonal columns. With `M` of at least `dim` the error is then
            of fourth order in small differences. Such frequencies are no longer
            independent, but as `M` grows, their distribution tends to the kernel's.
            `False` leaves the draws independent. Defaults to `True`.
        seed: int or `keras.random.SeedGenerator`.

    Returns:
        `(M, dim)`, float32.

    Raises:
        ValueError: For another power.
    """
    check_power(power)
    uniform = keras.random.uniform(
        (power // 2, num_frequencies, dim), -1.0, 1.0, "float32", seed
    )
    frequencies = ops.sum(uniform, axis=0)
    if not orthogonal:
        return frequencies
    left, _, right = ops.linalg.svd(frequencies, full_matrices=False)
    return math.sqrt(max(num_frequencies, dim) * power / 6) * (left @ right)


@symbolic
def squared_features(x, frequencies):
    """Features whose dot product is `(1/M Σ_i cos(ω_i·(x − y)))²`.

    Every product of two of the `2M` numbers `cos(ω_i·x)/√M` and `sin(ω_i·x)/√M`, once:
    `M(2M + 1)` features.

    Args:
        x: `(..., dim)`.
        frequencies: `(M, dim)`.

    Returns:
        Features `(..., M(2M + 1))` and `None`, like the maps of `ops.feature_maps`.
    """
    x = ops.convert_to_tensor(x)
    angles = x @ ops.transpose(frequencies)
    waves = ops.concatenate([cosine(angles), sine(angles)], axis=-1)
    waves = waves / math.sqrt(frequencies.shape[0])
    return pair_products(waves), None


def squared_features_size(num_frequencies):
    """Number of features of `squared_features`: `M(2M + 1)`."""
    return num_frequencies * (2 * num_frequencies + 1)


def linear_error(radius, dim, num_frequencies, power: int = 4):
    """Predicted relative error of the linear form's weights.

    ```
    ε = 2 √(V / K)
    V = (1/2 + c(h, 2R)^dim / 2 − c(2h, R)^dim) / M,   K = c(2h, R)^dim
    c(n, R) = E[sinc(R x)^n],   x ~ N(0, 2),   h = power / 2
    ```

    for standard normal queries and keys and `M` independent frequencies: `V` is the
    mean variance of the estimate of `Π sinc^h`, and the bias of its square, `K` the
    mean weight, and `ε` the root mean square error of the square relative to that of
    the weight, to first order. It falls with `√M`, and grows with `R` and `dim` as
    `√(1/K)`: `K` is about `exp(−power R² dim / 3)`.

    Args:
        radius: `R`, a positive number.
        dim: Size of the queries and keys.
        num_frequencies: `M`.
        power: 2, 4, 6 or 8. Defaults to 4.

    Returns:
        A float. From 1 on, the weights are noise.
    """
    # The trapezoidal rule, exact here to the last digits.
    x, step = np.linspace(-12.0, 12.0, 4001, retstep=True)
    density = np.exp(-(x**2) / 4) / math.sqrt(4 * math.pi) * step

    def mean(exponent, radius):
        return float(np.sum(density * np.sinc(radius * x / np.pi) ** exponent)) ** dim

    weight = mean(power, radius)
    variance = (1 + mean(power // 2, 2 * radius)) / 2 - weight
    return 2 * math.sqrt(max(variance, 0.0) / (num_frequencies * max(weight, 1e-300)))
