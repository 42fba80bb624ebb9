"""Feature maps for linear attention.

A map turns queries and keys into features whose dot product is their similarity.
Every function here works on the last axis of `x` and returns `(features, log_scale)`:
the true features are `features * exp(log_scale)[..., None]`, where `log_scale` has one
axis less, or is `None` for zero. Maps that grow fast return features of at most 1 and
put their size in `log_scale`; the stabiliser cancels exactly, whatever the input scale.
Sizes: `head_dim` is `x.shape[-1]`.
"""

import itertools
import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.constants import constant
from keras_efficient_attn.ops.common.feature_kernels.entrywise import SCALED_WIDTH
from keras_efficient_attn.ops.common.inputs import boolean_mask, hide_masked
from keras_efficient_attn.ops.common.numerics import (
    NORM_EPSILON,
    at_least,
    cosine,
    max_along,
    scale_vectors,
    sine,
)
from keras_efficient_attn.ops.common.plan import symbolic

# Lower bound of exponential features, relative to the largest of their vector. It is
# far below rounding, but prevents the similarity of vectors with different large
# features from underflowing to zero.
FEATURE_FLOOR = 1e-15
# A longer feature vector costs more than attending to as many keys.
MAX_POLYNOMIAL_FEATURES = 16_384


@symbolic
def positive_random_features(x, projection, hyperbolic: bool = False):
    """FAVOR+: positive random features of the exponential kernel.

    `φ(x) = exp(ωᵢ·x − ‖x‖²/2) / √m`, so that `E[φ(q)·φ(k)] = exp(q·k)` with relative
    root mean square error `√((exp(‖q + k‖²) − 1) / m)` for independent rows.

    Args:
        x: `(..., head_dim)`.
        projection: `(m, head_dim)`, rows N(0, I), as `random_projection` makes.
        hyperbolic: Whether to use `exp(±ωᵢ·x − ‖x‖²/2) / √(2m)`: twice the features
            of the same projection, with less variance. Defaults to `False`.

    Returns:
        Features `(..., m)`, or `(..., 2m)` if `hyperbolic`, and their log scale.

    Reference:
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    """
    x = ops.convert_to_tensor(x)
    exponents = x @ ops.transpose(projection)
    if hyperbolic:
        exponents = ops.concatenate([exponents, -exponents], axis=-1)
    return _exponential(exponents, -0.5 * ops.sum(ops.square(x), axis=-1))


@symbolic
def optimal_positive_features(x, projection, shape, hyperbolic: bool = False):
    """FAVOR++: positive random features with less variance, given statistics.

    `φ(x) = (1 − 4A)^(d/4) exp(A‖ωᵢ‖² + √(1 − 4A) ωᵢ·x − ‖x‖²/2) / √m`. Any `A < 1/8`
    is unbiased, `A = 0` is FAVOR+; `optimal_shape` gives the best. `A` may differ
    between coordinates: a diagonal matrix, with `det(1 − 4A)^(1/4)`.

    Args:
        x: `(..., head_dim)`.
        projection: `(m, head_dim)`, rows N(0, I).
        shape: `A`, broadcastable to `x`.
        hyperbolic: Whether to use `±ωᵢ`: twice the features of the same projection,
            with less variance. Defaults to `False`.

    Returns:
        Features `(..., m)`, or `(..., 2m)` if `hyperbolic`, and their log scale.

    Reference:
        - [Likhosherstov et al., 2022](https://arxiv.org/abs/2205.15317)
        - [Likhosherstov et al., 2023](https://arxiv.org/abs/2302.00787), matrices
    """
    x = ops.convert_to_tensor(x)
    shape = ops.cast(shape, x.dtype) * ops.ones((x.shape[-1],), x.dtype)
    rows = ops.transpose(projection)
    stretch = 1.0 - 4.0 * shape
    # Use matrices: TensorFlow has no `@` of a vector and a matrix, and `ops.matmul`
    # rounds float64 to float32 on PyTorch.
    norms = (shape[..., None, :] @ ops.square(rows))[..., 0, :]
    exponents = (ops.sqrt(stretch) * x) @ rows
    if hyperbolic:
        exponents = ops.concatenate([exponents, -exponents], axis=-1)
        norms = ops.concatenate([norms, norms], axis=-1)
    offset = 0.25 * ops.sum(ops.log(stretch), axis=-1)
    squares = ops.sum(ops.square(x), axis=-1)
    return _exponential(norms + exponents, offset - 0.5 * squares)


@symbolic
def optimal_shape(query, key, query_mask=None, key_mask=None):
    """The `A` of `optimal_positive_features` that minimises the mean log variance.

    It depends on the mean of `‖q + k‖²` over all pairs of a sequence, so that each
    query's features depend on every key: there is no causal form.

    Args:
        query, key: `(batch, length, heads, head_dim)`, scaled as for the features.
        query_mask, key_mask: Optional boolean `(batch, length)`; `False` positions are
            ignored.

    Returns:
        `(batch, heads)`, without gradient.
    """

    def mean(x, mask):
        # Use sums, because `ops.mean` rounds float64 to float32 on PyTorch.
        if mask is None:
            return ops.sum(x, axis=1) / ops.cast(shape_of(x)[1], x.dtype)
        number = ops.sum(ops.cast(mask, x.dtype), axis=1)[:, None, None]
        return ops.sum(hide_masked(x, mask), axis=1) / at_least(number, 1.0)

    query, key = map(ops.convert_to_tensor, (query, key))
    query_mask = boolean_mask(query_mask, "query_mask")
    key_mask = boolean_mask(key_mask)
    head_dim = query.shape[-1]
    squares = mean(ops.sum(ops.square(query), -1, keepdims=True), query_mask) + mean(
        ops.sum(ops.square(key), -1, keepdims=True), key_mask
    )
    products = mean(query, query_mask) * mean(key, key_mask)
    norm = squares[..., 0] + 2.0 * ops.sum(products, axis=-1)
    norm = at_least(ops.stop_gradient(norm), 1e-6)
    root = ops.sqrt(ops.square(2.0 * norm + head_dim) + 8.0 * head_dim * norm)
    # The textbook (root - 2 norm - d) / (4 norm) loses all digits for small norms.
    rho = 2.0 * head_dim / (root + 2.0 * norm + head_dim)
    return (1.0 - 1.0 / rho) / 8.0


@symbolic
def trigonometric_features(x, projection):
    """Random Fourier features of the exponential kernel, for comparison.

    `φ(x) = [cos(ωᵢ·x), sin(ωᵢ·x)] exp(‖x‖²/2) / √m`. Unbiased, but signed: where the
    similarity is small, sums of estimates cancel and denominators come near zero.

    Args:
        x: `(..., head_dim)`.
        projection: `(m, head_dim)`, rows N(0, I).

    Returns:
        Features `(..., 2m)` and their log scale.

    Reference:
        - [Rahimi & Recht, 2007](https://papers.nips.cc/paper/3182)
    """
    x = ops.convert_to_tensor(x)
    angles = x @ ops.transpose(projection)
    features = ops.concatenate([cosine(angles), sine(angles)], axis=-1)
    log_scale = 0.5 * ops.sum(ops.square(x), axis=-1)
    return features, log_scale - 0.5 * math.log(projection.shape[0])


@symbolic
def relu_features(x, projection=None, epsilon: float = 1e-3):
    """Generalised ReLU attention: `relu(ωᵢ·x) / √m + ε`, or `relu(x) + ε`.

    Args:
        x: `(..., head_dim)`.
        projection: Optional `(m, head_dim)`.
        epsilon: Smallest feature, so that no denominator is zero. Defaults to 1e-3.

    Returns:
        Features `(..., m)` or `(..., head_dim)`, and `None`.

    Reference:
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    """
    x = ops.convert_to_tensor(x)
    if projection is not None:
        x = x @ ops.transpose(projection) / math.sqrt(projection.shape[0])
    return ops.relu(x) + epsilon, None


@symbolic
def elu_features(x):
    """`elu(x) + 1`, positive at any scale.

    Vectors of fewer than 16 entries are divided by their largest feature if it is less
    than 1. Features are exact above 1e-15 (1e-140 in float64, 1e-4 in float16) of the
    largest, or of 1 in wider vectors, which are the entries above −34 (−322, −9).
    Smaller features count as that, so that every key has a weight.

    Args:
        x: `(..., head_dim)`.

    Returns:
        Features `(..., head_dim)` and their log scale, `None` from 16 entries on: it
        costs time, and such vectors rarely have only small features.

    Reference:
        - [Katharopoulos et al., 2020](https://arxiv.org/abs/2006.16236)
    """
    x = ops.convert_to_tensor(x)
    if x.shape[-1] >= SCALED_WIDTH:
        return _elu_plus_one(x), None
    log_scale = -ops.relu(-ops.stop_gradient(max_along(x, axis=-1)))
    return _elu_plus_one(x, log_scale[..., None]), log_scale


def unscaled_elu_features(x):
    """`elu_features` without a log scale at any width, for attention with gates."""
    return _elu_plus_one(x), None


def _elu_plus_one(x, log_scale=None):
    # A form without a branch, whose derivative at 0 is 1 and which stays positive where
    # `elu(x)` rounds to −1.
    positive = ops.relu(x)
    dtype = keras.backend.standardize_dtype(x.dtype)
    least = math.log({"float64": 1e-140, "float16": 1e-4}.get(dtype, FEATURE_FLOOR))
    exponent = x - positive if log_scale is None else x - positive - log_scale
    return positive + ops.exp(at_least(exponent, least))


@symbolic
def unit_features(x, epsilon: float = NORM_EPSILON):
    """`x / √(‖x‖² + epsilon · head_dim)`, and `None`.

    The constant bounds the derivative at zero.

    Args:
        x: `(..., head_dim)`.
        epsilon: Added to the mean square. Defaults to 1e-3.

    Reference:
        - [Yang et al., 2024](https://arxiv.org/abs/2406.06484)
    """
    x = ops.convert_to_tensor(x)
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return scale_vectors(x, ops.rsqrt(squares + epsilon * x.shape[-1])), None


@symbolic
def sum_features(x):
    """`x / max(Σ|x|, 1e-6)`, and `None`.

    Reference:
        - [Schlag et al., 2021](https://arxiv.org/abs/2102.11174)
    """
    x = ops.convert_to_tensor(x)
    total = ops.sum(ops.abs(x), axis=-1, keepdims=True)
    return x / at_least(total, 1e-6), None


@symbolic
def softmax_query_features(x):
    """Efficient attention's queries: softmax over the last axis, and `None`.

    Reference:
        - [Shen et al., 2021](https://arxiv.org/abs/1812.01243)
    """
    return ops.softmax(x, axis=-1), None


@symbolic
def exponential_features(x):
    """`exp(x)`, entry by entry.

    Also the key features for `softmax_query_features`. Efficient attention divides each
    feature by its own sum over the keys; here, as in all linear attention of this
    package, one denominator divides the whole row.

    Args:
        x: `(..., head_dim)`.

    Returns:
        Features `(..., head_dim)` and their log scale.
    """
    return _exponential(ops.convert_to_tensor(x), 0.5 * math.log(x.shape[-1]))


@symbolic
def hedgehog_features(x, kernel):
    """`softmax([Wx, −Wx])`, with a matrix `W` for each head.

    Args:
        x: `(batch, heads, chunks, chunk_size, head_dim)`.
        kernel: `(heads, head_dim, m)`, the transposed matrices.

    Returns:
        Features `(batch, heads, chunks, chunk_size, 2m)` and `None`.

    Reference:
        - [Zhang et al., 2024](https://arxiv.org/abs/2402.04347)
    """
    x = ops.einsum("bhcsd,hdm->bhcsm", x, kernel)
    both = ops.concatenate([x, -x], axis=-1)
    return ops.softmax(both, axis=-1) + FEATURE_FLOOR, None


@symbolic
def learned_exponential_features(x, kernel, bias, norm):
    """`φ(x) = exp(Wx + b − Σⱼ nⱼ xⱼ²) / √m`, with weights for each head.

    With random rows `±ω` in `W`, no bias and `n = ½` these are hyperbolic features.

    Args:
        x: `(batch, heads, chunks, chunk_size, head_dim)`.
        kernel: `(heads, head_dim, m)`, the transposed matrices `W`.
        bias: `b`, `(heads, m)`.
        norm: `n`, `(heads, head_dim)`.

    Returns:
        Features `(batch, heads, chunks, chunk_size, m)` and their log scale.

    Reference:
        - [Zhang et al., 2024](https://arxiv.org/abs/2402.04347)
    """
    x, bias, norm = map(ops.convert_to_tensor, (x, bias, norm))
    exponents = ops.einsum("bhcsd,hdm->bhcsm", x, kernel) + bias[:, None, None]
    squares = ops.sum(norm[:, None, None] * ops.square(x), axis=-1)
    return _exponential(exponents, -squares)


@symbolic
def taylor_features(x, order: int = 2):
    """Taylor expansion of the exponential kernel: `φ(q)·φ(k) = Σ_{i≤p} (q·k)^i / i!`.

    Has every monomial of degree up to `p` once: `C(head_dim + p, p)` features. An even
    order is positive everywhere; an odd one gives negative weights where `q·k` is far
    below 0, and layers refuse it.

    Args:
        x: `(..., head_dim)`.
        order: `p`, a positive integer. Defaults to 2.

    Returns:
        Features `(..., C(head_dim + p, p))` and their log scale.

    Raises:
        ValueError: For another order, or if there would be too many features to help.

    Reference:
        - [Arora et al., 2024](https://arxiv.org/abs/2402.18668)
        - [Su, 2021](https://kexue.fm/archives/8601)
    """
    return _monomials(x, order, "taylor")


@symbolic
def power_features(x, order: int = 2):
    """The exponential's definition at finite n: `φ(q)·φ(k) = (1 + q·k/n)^n`.

    `C(head_dim + n, n)` features, as many as `taylor_features` of the same order,
    with a larger error for small logits. Zero at `q·k = −n`. Arguments, returns and
    errors as for `taylor_features`.

    Reference:
        - [Su, 2021](https://kexue.fm/archives/8601)
    """
    return _monomials(x, order, "power")


def polynomial_dimension(head_dim, order):
    """Features of `taylor_features` and `power_features`; checks that they can help.

    Args:
        head_dim: Size of the queries and keys.
        order: Positive integer.

    Returns:
        `C(head_dim + order, order)`.

    Raises:
        ValueError: For another order, or if there would be too many features to help.
    """
    check_positive_int("order", order)
    size = math.comb(head_dim + order, order)
    if size > MAX_POLYNOMIAL_FEATURES:
        raise ValueError(
            f"A polynomial map of order n on heads of size d has C(d + n, n) features. "
            f"Received: d={head_dim}, order={order}, which makes {size} features; "
            f"more than {MAX_POLYNOMIAL_FEATURES} cost more than softmax attention. "
            "Use a smaller `key_dim` or order, or random features."
        )
    return size


def _exponential(exponents, offset):
    """`exp(exponents + offset) / √m`, as features of at most 1 and a log scale."""
    largest = ops.stop_gradient(max_along(exponents, axis=-1))
    log_scale = largest + offset - 0.5 * math.log(exponents.shape[-1])
    return ops.exp(exponents - largest[..., None]) + FEATURE_FLOOR, log_scale


def _monomials(x, order, kind):
    """Weighted monomials of degree `order` in `(1, x)`, scaled into [−1, 1].

    Homogeneous, so that dividing `(1, x)` by its largest entry only changes a log
    scale.
    """
    x = ops.convert_to_tensor(x)
    polynomial_dimension(x.shape[-1], order)
    if kind == "power":
        x = x / math.sqrt(order)
    x = ops.concatenate([ops.ones_like(x[..., :1]), x], axis=-1)
    largest = ops.stop_gradient(max_along(ops.abs(x), axis=-1))
    features = _weighted_monomials(x / largest[..., None], order, kind)
    return features, order * ops.log(largest)


def _weighted_monomials(x, order, kind):
    """Monomials of one degree, weighted so that their dot product is the kernel.

    The first entry of `x` represents the constant 1.
    """
    size = x.shape[-1]
    weights = constant(_monomial_weights, size, order, kind, dtype=x.dtype)
    if tuple(x.shape[-3:-1]) == (1, 1):
        # For one position, use few operations. For sequences, avoid gathers: their
        # gradients would be added up row by row.
        factors = np.transpose(_monomial_indices(size, order))
        return math.prod(ops.take(x, factor, axis=-1) for factor in factors) * weights
    # Monomials of the next degree, sorted by their first factor i. The monomials that
    # may follow i have a first factor of at least i: a suffix.
    monomials = x
    starts = list(range(size))
    for _ in range(order - 1):
        blocks = [x[..., i : i + 1] * monomials[..., starts[i] :] for i in range(size)]
        monomials = ops.concatenate(blocks, axis=-1)
        widths = [block.shape[-1] for block in blocks]
        starts = [sum(widths[:i]) for i in range(size)]
    return monomials * weights


def _monomial_indices(size, order):
    """The factors of each monomial, sorted, as tuples of `order` indices."""
    return list(itertools.combinations_with_replacement(range(size), order))


def _monomial_weights(size, order, kind):
    """√ of each monomial's coefficient; index 0 is the constant 1."""
    weights = []
    for indices in _monomial_indices(size, order):
        counts = np.unique(indices, return_counts=True)
        repeats = math.prod(
            math.factorial(int(count))
            for index, count in zip(*counts, strict=True)
            if kind == "power" or index != 0
        )
        weights.append(
            math.sqrt((math.factorial(order) if kind == "power" else 1) / repeats)
        )
    return np.array(weights)
