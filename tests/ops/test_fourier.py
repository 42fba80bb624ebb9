"""Fourier attention against its definition, the estimators against theorems."""

import math

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import fourier
from keras_efficient_attn.ops.fourier import api as fourier_api
from tests import dense
from tests.autodiff import assert_slope, gradients, to_numpy
from tests.largest_tensor import largest_tensor, temporary_bytes

LENGTH, KEYS, DIM = 11, 9, 5


def draw(scale=1.0, dim=DIM, seed=0):
    random = np.random.default_rng(seed)
    query = random.normal(size=(2, LENGTH, 2, dim)) * scale
    key = random.normal(size=(2, KEYS, 2, dim)) * scale
    value = random.normal(size=(2, KEYS, 2, 3))
    mask = random.random((2, KEYS)) > 0.3
    return *(x.astype("float32") for x in (query, key, value)), mask


def definition(query, key, value, radius, power, mask=None, causal=False):
    """Dense float64, in log space, each row relative to its largest weight."""
    z = radius * (query[:, :, None].astype("float64") - key[:, None])
    logs = power * np.log(abs(np.sinc(z / np.pi))).sum(-1)
    logs = np.moveaxis(logs, -1, 1)
    return dense.weigh_logs(logs, value, mask, causal)[0]


@pytest.mark.parametrize("power", fourier.POWERS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_both_implementations_equal_the_definition(power, causal, monkeypatch):
    monkeypatch.setattr(fourier_api, "LEAST_PART", 4)
    query, key, value, drawn = draw()
    radius = np.array([[0.4], [0.9]], "float32")
    for mask in (None, drawn):
        expected = definition(query, key, value, radius, power, mask, causal)
        for implementation in ("tiled", "reference"):
            output = fourier.fourier_attention(
                query,
                key,
                value,
                radius,
                power=power,
                key_mask=mask,
                causal=causal,
                chunk_size=1,
                implementation=implementation,
            )
            np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "radius", "dim"), [(1.0, 2.0, 64), (3.0, 2.0, 16)], ids=str
)
def test_rows_whose_weights_are_zero_in_float32(scale, radius, dim):
    query, key, value, mask = draw(scale, dim)
    z = np.float32(radius) * (query[:, :, None] - key[:, None])
    naive = np.prod(np.sinc(z / np.float32(np.pi)) ** 4, axis=-1)
    assert np.all(np.median(naive, axis=2) == 0)
    output = fourier.fourier_attention(query, key, value, radius, key_mask=mask)
    expected = definition(query, key, value, radius, 4, mask)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("implementation", "power", "scale", "radius", "causal"),
    [
        ("tiled", 2, 1.0, np.full((2, DIM), 0.5), True),
        ("tiled", 4, 8.0, np.full((2, 1), 20.0), False),
        ("fused", 4, 2.0, np.full((2, 1), 1.3), False),
        ("reference", 6, 1.0, np.full((2, DIM), 0.5), False),
    ],
    ids=["wide", "narrow", "fused", "reference"],
)
def test_gradients_are_the_slopes_of_the_definition(
    implementation, power, scale, radius, causal, monkeypatch, backend
):
    """Of all four arguments; the narrow kernel is 0 in float32 for most pairs.

    Hidden keys are NaN.
    """
    monkeypatch.setattr(fourier_api, "LEAST_PART", 4)
    if backend == "torch":
        monkeypatch.setattr("keras_efficient_attn.ops.fourier.kernels.torch.BLOCK", 4)
    *arrays, mask = draw(scale)
    z = (radius * (arrays[0][:, :, None] - arrays[1][:, None])).astype("float32")
    naive = np.prod(np.sinc(z / np.float32(np.pi)) ** power, axis=-1)
    assert (np.median(naive) == 0) == (scale == 8.0)
    arrays.append(radius * np.linspace(0.9, 1.1, radius.size).reshape(radius.shape))
    arrays = [x.astype("float32") for x in arrays]
    weight = np.random.default_rng(1).normal(size=(2, LENGTH, 2, 3))
    poisoned = list(arrays)
    for i in (1, 2):
        poisoned[i] = np.where(mask[..., None, None], arrays[i], np.nan)

    def attend(*tensors):
        return fourier.fourier_attention(
            *tensors,
            power=power,
            key_mask=mask,
            causal=causal,
            chunk_size=1,
            implementation=implementation,
        )

    def loss(*tensors):
        return ops.sum(ops.multiply(attend(*tensors), weight.astype("float32")))

    def exact(*arrays):
        return definition(*arrays, power, mask, causal)

    output = to_numpy(attend(*poisoned))
    np.testing.assert_allclose(output, exact(*arrays), rtol=1e-3, atol=1e-4)
    for i, gradient in enumerate(gradients(loss, *poisoned)):
        how = dict(step=1e-6, tolerance=1e-4)
        assert_slope(gradient, lambda *x: (exact(*x) * weight).sum(), arrays, i, **how)


def test_second_derivatives_are_those_of_the_definition(backend):
    if backend != "jax":
        pytest.skip("JAX alone has second derivatives")
    import jax

    query, key, value, _ = draw(scale=2.0)
    weight = np.random.default_rng(1).normal(size=(2, LENGTH, 2, 3))
    random = np.random.default_rng(2)
    direction, other = (random.normal(size=query.shape) for _ in range(2))

    def loss(query):
        return (fourier.fourier_attention(query, key, value, 0.9) * weight).sum()

    slope = jax.jvp(jax.grad(loss), (query,), (direction.astype("float32"),))[1]
    received = (np.asarray(slope, "float64") * other).sum()

    def shift(first, second):
        there = query.astype("float64") + first * direction + second * other
        return (definition(there, key, value, 0.9, 4) * weight).sum()

    h = 1e-4
    corners = [a * b * shift(a * h, b * h) for a in (1, -1) for b in (1, -1)]
    expected = sum(corners) / (4 * h * h)
    assert abs(received - expected) < 1e-3 * np.abs(slope).max() * np.abs(other).sum()
    assert abs(received - expected) < 0.01 * abs(expected)


def test_multiples_of_pi_have_no_weight_and_no_slope():
    """Query 0 against keys at nπ, in one dimension: the first and the last count."""
    power = 2
    places = np.array([0.0, 1, 2, -3, 100, 0.5]) * np.pi
    key = places.astype("float32")[None, :, None, None]
    query = np.zeros((1, 1, 1, 1), "float32")
    value = np.arange(1.0, 7.0, dtype="float32")[None, :, None, None]
    half = np.float64(2 / np.pi) ** power
    expected = (1 + 6 * half) / (1 + half)
    output = fourier.fourier_attention(query, key, value, 1.0, power=power)
    np.testing.assert_allclose(to_numpy(output).item(), expected, rtol=1e-6)

    def loss(query, key):
        return ops.sum(fourier.fourier_attention(query, key, value, 1.0, power=power))

    grad_query, grad_key = gradients(loss, query, key)
    # d sinc^p / dz = p sinc^p (cot z − 1/z), of key 5, where cot is 0.
    slope = -power * half / (np.pi / 2) * (6 - expected) / (1 + half)
    np.testing.assert_allclose(grad_key.ravel(), [0] * 5 + [slope], atol=2e-6)
    np.testing.assert_allclose(grad_query.item(), -slope, atol=2e-6)


def test_weights_that_are_all_near_zero_have_finite_gradients():
    key = (np.arange(1, 9) * np.pi).astype("float32")[None, :, None, None]
    query = np.zeros((1, 1, 1, 1), "float32")

    def loss(query, key, radius):
        return ops.sum(fourier.fourier_attention(query, key, key, radius))

    for gradient in gradients(loss, query, key, np.float32(1.0)):
        assert np.all(np.isfinite(gradient))


def test_a_radius_near_zero_is_uniform_attention():
    query, key, value, mask = draw()
    output = fourier.fourier_attention(query, key, value, 1e-4, key_mask=mask)
    mean = np.stack([v[m].mean(0) for v, m in zip(value, mask, strict=True)])
    expected = np.broadcast_to(mean[:, None], output.shape)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-5, atol=1e-6)


def test_the_kernel_is_even_and_knows_differences_only():
    query, key, value, _ = draw()
    radius = np.float32(0.7)
    output = to_numpy(fourier.fourier_attention(query, key, value, radius))
    for other in (
        (-query, -key, value, radius),
        # The values of a tensor are not checked: a learned radius may turn negative.
        (query, key, value, ops.convert_to_tensor(-radius)),
        (query + 2, key + 2, value, radius),
        (query[..., ::-1], key[..., ::-1], value, radius),
    ):
        same = to_numpy(fourier.fourier_attention(*other))
        np.testing.assert_allclose(same, output, rtol=1e-4, atol=1e-5)


def test_first_position_is_where_the_queries_stand():
    query, key, value, _ = draw()
    whole = fourier.fourier_attention(query[:, :KEYS], key, value, 0.5, causal=True)
    part = fourier.fourier_attention(
        query[:, 4:KEYS], key, value, 0.5, causal=True, first_position=4
    )
    np.testing.assert_allclose(
        to_numpy(part), to_numpy(whole)[:, 4:], rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("on_cpu")
def test_pairs_are_not_stored_on_torch(backend):
    if backend != "torch":
        pytest.skip("counts what PyTorch's autograd saves")
    import torch

    length = 128
    x = torch.randn((1, length, 1, 4), requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = fourier.fourier_attention(x, x, x, 0.5)
    assert sum(saved) < length**2
    output.sum().backward()
    assert torch.all(torch.isfinite(x.grad)) and torch.any(x.grad != 0)


def test_memory_of_the_compiled_program_grows_with_the_length_alone(backend):
    if backend != "jax":
        pytest.skip("reads the size of XLA's temporaries")
    import jax

    dim = 8

    def temporaries(length):
        def loss(x):
            return ops.sum(fourier.fourier_attention(x, x, x, 0.5, chunk_size=1))

        shape = jax.ShapeDtypeStruct((1, length, 1, dim), "float32")
        return temporary_bytes(jax.grad(loss), shape)

    # Long enough for the smallest tile.
    short, long = temporaries(2**16), temporaries(2**17)
    assert long < 2.5 * short < 2.5 * 2**16 * dim * 4 * 100


@pytest.mark.parametrize(
    ("power", "fraction"), [(2, 1), (4, 2 / 3), (6, 11 / 20), (8, 151 / 315)]
)
def test_kernel_integral(power, fraction):
    assert math.isclose(fourier.kernel_integral(power), fraction * math.pi)
    z, step = np.linspace(-2000, 2000, 2_000_001, retstep=True)
    total = (np.sinc(z / np.pi) ** power).sum() * step
    assert math.isclose(total, fraction * math.pi, rel_tol=2e-3)


def test_density_integrates_to_one_and_converges():
    random = np.random.default_rng(0)
    samples = random.normal(size=(1000, 1)).astype("float32")
    points, step = np.linspace(-15, 15, 501, retstep=True)
    density = to_numpy(
        fourier.fourier_density(points[:, None].astype("float32"), samples, 4.0)
    )
    assert density.min() >= 0
    assert math.isclose(density.sum() * step, 1.0, rel_tol=1e-3)
    normal = np.exp(-(points**2) / 2) / math.sqrt(2 * math.pi)
    # Its mean is the density's convolution with the kernel.
    kernel = 4.0 / fourier.kernel_integral(4) * np.sinc(4 * points / np.pi) ** 4
    mean = np.convolve(normal, kernel, "same") * step
    deviation = np.sqrt(np.convolve(normal, kernel**2, "same") * step / len(samples))
    assert np.abs(density - mean).max() < 5 * deviation.max()


def test_regression_finds_a_function():
    random = np.random.default_rng(0)
    samples = random.uniform(-2, 2, size=(4000, 2)).astype("float32")
    noise = 0.1 * random.normal(size=4000)
    targets = np.stack([np.sin(samples[:, 0]) * samples[:, 1] + noise], -1)
    points = random.uniform(-1, 1, size=(50, 2)).astype("float32")
    received = to_numpy(
        fourier.fourier_regression(points, samples, targets.astype("float32"), 8.0)
    )
    expected = np.sin(points[:, 0]) * points[:, 1]
    assert np.abs(received[:, 0] - expected).max() < 0.1
    dense_expected = definition(
        *(x[None, :, None] for x in (points, samples, targets)), 8.0, 4
    )
    np.testing.assert_allclose(received, dense_expected[0, :, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("power", [1, 3, 6, 10])
def test_estimators_are_the_formula(power):
    random = np.random.default_rng(0)
    samples, points = (random.normal(size=(n, 2)) for n in (30, 7))
    # A sample at a point: sin(0)/0 is 1.
    points[0] = samples[0]
    targets = random.normal(size=(30, 3)) + 5
    radius = np.array([0.7, 2.0], "float32")
    weights = np.sinc(radius * (points[:, None] - samples) / np.pi).prod(-1) ** power
    single = [x.astype("float32") for x in (points, samples, targets)]
    volume = radius.prod() / fourier.kernel_integral(power) ** 2
    np.testing.assert_allclose(
        to_numpy(fourier.fourier_density(*single[:2], radius, power=power)),
        volume * weights.mean(-1),
        rtol=1e-4,
        atol=1e-6 * (power % 2),
    )
    np.testing.assert_allclose(
        to_numpy(fourier.fourier_regression(*single, radius, power=power)),
        weights @ targets / weights.sum(-1, keepdims=True),
        rtol=1e-3,
    )
    z, step = np.linspace(-2000, 2000, 4_000_001, retstep=True)
    integral = np.sum(np.sinc(z / np.pi) ** power) * step
    assert math.isclose(fourier.kernel_integral(power), integral, rel_tol=1e-3)


SAMPLES = 250, 1000, 4000, 16000, 64000
# With the theorem's radius over this, bias and variance of the semicircle are as large.
SCALE = 1.5


def slope(sizes, errors):
    return np.polyfit(np.log(sizes), np.log(errors), 1)[0]


def draw_semicircle(random, shape):
    """Coordinates of points in a disc, each of which has `semicircle` for density."""
    angle, square = random.uniform(0, 2 * np.pi, shape), random.uniform(size=shape)
    return (np.sqrt(square) * np.cos(angle)).astype("float32")


def semicircle(x):
    """The density `2/π √(1 − x²)`, whose Fourier transform is `2 J₁(ω) / ω`.

    It falls as `ω^(-3/2)`, so that the squared bias falls as `1 / R²`, as the theorem
    allows, and not faster, as that of smooth densities does.
    """
    return 2 / np.pi * np.sqrt(np.maximum(1 - x**2, 0.0))


def squared_bias(radius, power=4):
    """`∫ (E p_R(x) − p(x))² dx` of the semicircle, by the convolution on a grid."""
    points, step = np.linspace(-4, 4, 40_001, retstep=True)
    kernel = np.sinc(radius * points / np.pi) ** power
    kernel *= radius / fourier.kernel_integral(power)
    size = 2 * len(points)
    mean = np.fft.irfft(
        np.fft.rfft(semicircle(points), size) * np.fft.rfft(kernel, size), size
    )[20_000:60_001]
    return np.sum((mean * step - semicircle(points)) ** 2) * step


@pytest.mark.any_backend
@pytest.mark.parametrize("moments", [1, 3])
def test_the_best_radius_balances_bias_and_variance(moments):
    """Of `R^−b + R^dim / N`, the bias has b = m + 1 for densities, else 2m + 2."""
    radii = np.exp(np.linspace(0, 5, 20001))
    for estimator, order in (("density", moments + 1), ("regression", 2 * moments + 2)):
        size, dim = 10_000, 2
        difference = np.abs(radii**-order - radii**dim / size)
        expected = radii[difference.argmin()]
        found = fourier.best_radius(size, dim, estimator, moments=moments)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.any_backend
def test_densities_converge_at_the_rate_of_the_theorem():
    """The squared error, integrated, falls as `N^(-2/3)` in one dimension."""
    random, errors = np.random.default_rng(0), []
    points, step = np.linspace(-2.5, 2.5, 301, retstep=True)
    for size in SAMPLES:
        radius, squares = fourier.best_radius(size, 1, "density", SCALE), []
        for _ in range(4):
            samples = draw_semicircle(random, (size, 1))
            found = fourier.fourier_density(
                points[:, None].astype("float32"), samples, radius
            )
            squares.append(np.sum((to_numpy(found) - semicircle(points)) ** 2) * step)
        # Bias and variance are both there: together they are the error.
        assert 0.25 < squared_bias(radius) / np.mean(squares) < 0.75
        # The variance is `c R / N − ∫ p² / N`; the theorem bounds its first term.
        smaller = np.sum(semicircle(points) ** 2) * step / size
        errors.append(np.mean(squares) + smaller)
    assert abs(slope(SAMPLES, errors) + 2 / 3) < 0.08


@pytest.mark.any_backend
def test_densities_of_two_dimensions_converge_at_the_rate_of_the_theorem():
    """The squared error, integrated, falls as `N^(-1/2)`."""
    random, errors = np.random.default_rng(0), []
    # The integral, by points at random.
    points = random.uniform(-1.5, 1.5, size=(400, 2))
    expected = semicircle(points).prod(-1)
    for size in SAMPLES:
        radius, squares = fourier.best_radius(size, 2, "density", SCALE), []
        for _ in range(3):
            samples = draw_semicircle(random, (size, 2))
            found = fourier.fourier_density(points.astype("float32"), samples, radius)
            squares.append(np.mean((to_numpy(found) - expected) ** 2) * 9)
        errors.append(np.mean(squares))
    assert abs(slope(SAMPLES, errors) + 1 / 2) < 0.08


@pytest.mark.any_backend
def test_regressions_converge_at_the_rate_of_the_theorem():
    """The squared error falls as `N^(-4/5)` in one dimension, with the power 6."""
    random, errors = np.random.default_rng(0), []
    points = np.linspace(-0.5, 0.5, 100)[:, None]
    for size in SAMPLES:
        radius, squares = fourier.best_radius(size, 1, scale=0.3), []
        for _ in range(6):
            samples = random.uniform(-1, 1, size=(size, 1))
            targets = np.sin(4 * samples) + 0.5 * random.normal(size=(size, 1))
            found = fourier.fourier_regression(
                *(x.astype("float32") for x in (points, samples, targets)), radius, 6
            )
            squares.append(np.mean((to_numpy(found) - np.sin(4 * points)) ** 2))
        errors.append(np.mean(squares))
    assert abs(slope(SAMPLES, errors) + 4 / 5) < 0.12


def test_gaussian_regression_is_softmax_for_keys_of_one_norm():
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(n, 4)) for n in (5, 9, 9))
    key *= 3 / np.linalg.norm(key, axis=-1, keepdims=True)
    weights = np.exp(query @ key.T / 2)
    expected = weights @ value / weights.sum(-1, keepdims=True)
    single = (x.astype("float32") for x in (query, key, value))
    received = fourier.gaussian_regression(*single, sigma=4**0.25)
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-4, atol=1e-5)


# The linear form.


def estimates(difference, frequencies):
    """`1/M Σ cos(ω_i·x)`, for `(pairs, dim)` and `(draws, M, dim)`."""
    return np.cos(np.einsum("pd,nmd->pnm", difference, frequencies)).mean(-1)


@pytest.mark.parametrize("power", fourier.POWERS)
def test_features_are_a_square_that_estimates_the_kernel(power):
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(7, 3)).astype("float32") for _ in range(2))
    draws, rows = 4000, 2
    frequencies = to_numpy(
        fourier.kernel_frequencies(draws * rows, 3, power, orthogonal=False, seed=1)
    )
    # The mean of the cosine is the root of the kernel, and its variance known.
    difference = 0.8 * (x - y)
    cosines = estimates(difference, frequencies.reshape(draws * rows, 1, 3))
    root = np.sinc(difference / np.pi).prod(-1) ** (power // 2)
    twice = np.sinc(2 * difference / np.pi).prod(-1) ** (power // 2)
    variance = (1 + twice) / 2 - root**2
    deviation = np.sqrt(variance / (draws * rows))
    assert np.all(np.abs(cosines.mean(1) - root) < 4.5 * deviation)
    np.testing.assert_allclose(cosines.var(1), variance, rtol=0.1, atol=1e-3)
    # They are squared row by row; the square is biased by the variance.
    estimate = estimates(difference, frequencies.reshape(draws, rows, 3))
    spread = (estimate**2).std(1) / math.sqrt(draws)
    bias = (estimate**2).mean(1) - root**2
    assert np.all(np.abs(bias - variance / rows) < 4.5 * spread)
    first = ops.convert_to_tensor(frequencies[:rows])
    features = [
        to_numpy(fourier.squared_features(ops.convert_to_tensor(0.8 * t), first)[0])
        for t in (x, y)
    ]
    assert features[0].shape == (7, fourier.squared_features_size(rows))
    np.testing.assert_allclose(
        (features[0] * features[1]).sum(-1), estimate[:, 0] ** 2, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("dim", "radius", "power"), [(4, 0.4, 4), (16, 0.2, 2)])
def test_the_error_of_the_linear_form_is_the_predicted_one(dim, radius, power):
    random = np.random.default_rng(0)
    difference = radius * math.sqrt(2) * random.normal(size=(300, dim))
    kernel = np.sinc(difference / np.pi).prod(-1) ** power
    for rows in (64, 256):
        frequencies = fourier.kernel_frequencies(
            40 * rows, dim, power, orthogonal=False, seed=2
        )
        frequencies = to_numpy(frequencies).reshape(40, rows, dim)
        error = estimates(difference, frequencies) ** 2 - kernel[:, None]
        relative = math.sqrt((error**2).mean() / (kernel**2).mean())
        predicted = fourier.linear_error(radius, dim, rows, power)
        assert 0.6 * predicted < relative < 1.1 * predicted


def test_orthogonal_frequencies_have_exact_second_moments_and_less_error():
    dim, power, radius = 8, 4, 0.3
    frequencies = to_numpy(fourier.kernel_frequencies(24, dim, power, seed=3))
    moments = frequencies.T @ frequencies / 24
    np.testing.assert_allclose(moments, power / 6 * np.eye(dim), atol=1e-5)
    random = np.random.default_rng(0)
    difference = radius * math.sqrt(2) * random.normal(size=(2000, dim))
    kernel = np.sinc(difference / np.pi).prod(-1) ** power
    errors = []
    for orthogonal in (True, False):
        frequencies = fourier.kernel_frequencies(24, dim, power, orthogonal, seed=4)
        estimate = estimates(difference, to_numpy(frequencies)[None])[:, 0] ** 2
        errors.append(math.sqrt(((estimate - kernel) ** 2).mean()))
    assert errors[0] < 0.5 * errors[1]


def test_many_orthogonal_frequencies_tend_to_the_kernel():
    """Four times as many have half the error, without a remaining bias."""
    dim, power, radius = 8, 4, 0.5
    random = np.random.default_rng(0)
    difference = radius * math.sqrt(2) * random.normal(size=(500, dim))
    kernel = np.sinc(difference / np.pi).prod(-1) ** power
    errors = []
    for rows in (256, 1024, 4096):
        frequencies = to_numpy(fourier.kernel_frequencies(rows, dim, power, seed=5))
        estimate = estimates(difference, frequencies[None])[:, 0] ** 2
        errors.append(math.sqrt(((estimate - kernel) ** 2).mean()))
        predicted = fourier.linear_error(radius, dim, rows, power)
        assert errors[-1] < predicted * math.sqrt((kernel**2).mean())
    assert errors[1] < 0.7 * errors[0] and errors[2] < 0.7 * errors[1]


def test_few_frequencies_are_orthogonal_rows():
    frequencies = to_numpy(fourier.kernel_frequencies(3, 8, 6, seed=5))
    np.testing.assert_allclose(frequencies @ frequencies.T, 8 * np.eye(3), atol=1e-5)


def test_the_predicted_error_falls_with_the_root_of_the_frequencies():
    one, four = (fourier.linear_error(0.2, 16, m) for m in (10, 40))
    assert math.isclose(one, 2 * four)
    assert fourier.linear_error(2.0, 16, 16) > 100


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": np.zeros((2, 3, 5))}, ValueError, r"must have the shape"),
        ({"key": np.zeros((2, KEYS, 2, 4))}, ValueError, "heads and dim"),
        ({"value": np.zeros((2, 4, 2, 3))}, ValueError, "batch, length and heads"),
        ({"key_mask": np.ones((2, 4))}, ValueError, r"key_mask\.shape=\(2, 4\)"),
        ({"value": np.zeros((2, KEYS, 2, 3), "int32")}, TypeError, "int32"),
        ({"power": 3}, ValueError, "power=3"),
        ({"radius": 0}, ValueError, "`radius` must be positive. Received: radius=0"),
        ({"radius": np.array([1.0, -1.0] * 3)}, ValueError, "must be positive"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"implementation": "fast"}, ValueError, "implementation='fast'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors(changes, error, message):
    query, key, value, _ = draw()
    arguments = {"query": query, "key": key, "value": value, "radius": 1.0, **changes}
    tensors = [arguments.pop(name) for name in ("query", "key", "value", "radius")]
    with pytest.raises(error, match=message):
        fourier.fourier_attention(*tensors, **arguments)


@pytest.mark.parametrize("power", [3, 4])
def test_estimators_of_integers(power):
    points, samples, targets = [[0], [1]], [[0], [1], [3]], [[2], [0], [1]]
    z = 0.5 * (np.array(points) - np.transpose(samples)) / np.pi
    weights = np.sinc(z) ** power
    density = 0.5 / fourier.kernel_integral(power) * weights.mean(1)
    received = fourier.fourier_density(points, samples, 0.5, power=power)
    np.testing.assert_allclose(to_numpy(received), density, rtol=1e-4)
    received = fourier.fourier_regression(points, samples, targets, 0.5, power=power)
    expected = weights @ targets / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-4)
    weights = np.exp(-((np.array(points) - np.transpose(samples)) ** 2) / 2)
    expected = weights @ targets / weights.sum(1, keepdims=True)
    received = fourier.gaussian_regression(points, samples, targets, sigma=1)
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-4)


def test_errors_of_the_estimators():
    x = np.zeros((4, 2), "float32")
    with pytest.raises(ValueError, match="power=0"):
        fourier.kernel_integral(0)
    with pytest.raises(ValueError, match="power=1.5"):
        fourier.fourier_density(x, x, 1.0, power=1.5)
    with pytest.raises(ValueError, match="estimator='mean'"):
        fourier.best_radius(10, 1, "mean")
    with pytest.raises(ValueError, match="scale=0"):
        fourier.best_radius(10, 1, scale=0)
    with pytest.raises(ValueError, match="sigma=-1.0"):
        fourier.gaussian_regression(x, x, x, sigma=-1.0)
    with pytest.raises(ValueError, match=r"targets\.shape=\(3, 1\)"):
        fourier.fourier_regression(x, x, np.zeros((3, 1), "float32"), 1.0)
    with pytest.raises(ValueError, match=r"points\.shape=\(4, 1\)"):
        fourier.fourier_density(x[:, :1], x, 1.0)
    for radius in (-1.0, 0, np.array([1.0, -2.0]), [0.0, 1.0]):
        with pytest.raises(ValueError, match="`radius` must be positive"):
            fourier.fourier_density(x, x, radius)
    with pytest.raises(ValueError, match=r"radius\.shape=\(3,\)"):
        fourier.fourier_regression(x, x, x, np.ones(3), power=3)


def test_the_integral_of_a_high_power_is_that_of_a_gaussian():
    """`(sin z / z)^n` tends to `exp(-n z²/6)`, its integral to 1 - 3/20n of that."""
    for power in (200, 400):
        expected = math.sqrt(6 * math.pi / power) * (1 - 3 / (20 * power))
        assert math.isclose(fourier.kernel_integral(power), expected, rel_tol=1e-5)


def test_dense_forms_hold_no_tensor_of_all_pairs_and_dimensions():
    random = np.random.default_rng(0)
    points, samples = (random.normal(size=(n, 64)).astype("float32") for n in (50, 80))
    for form in (
        lambda x: fourier.fourier_density(x, samples, 1.0, power=3),
        lambda x: fourier.gaussian_regression(x, samples, samples, sigma=9.0),
    ):
        largest = largest_tensor(lambda x, f=form: ops.sum(ops.square(f(x))), points)
        assert 50 * 80 <= largest <= 50 * 80 * 2
