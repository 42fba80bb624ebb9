"""Statistics of the queries and keys of a trained layer, for `PerformerAttention`."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.arguments import identity
from keras_efficient_attn.ops.common.numerics import wide_dtype

# Every direction counts with at least this fraction of the mean variance of queries or
# keys, so that no direction is scaled without bound.
LEAST_VARIANCE = 1e-6
# Number of queries per sequence to calibrate with: their weights form a matrix.
MOST_QUERIES = 512
# Larger exponents are capped.
LARGEST_EXPONENT = 100.0


class KernelCalibration(keras.layers.Layer):
    """Means, coordinates and shapes per head; the identity until `assign`.

    Args:
        num_heads, dim: Number of heads and their size.
        random: Whether the features are random; these have `seen` and `shape`.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, num_heads, dim, random, **kwargs):
        super().__init__(**kwargs)
        self.sizes = (num_heads, dim)
        self.random = random

    def build(self, input_shape=None):
        heads, dim = self.sizes

        def weight(name, initializer, *shape):
            return self.add_weight(
                name=name,
                shape=(heads, *shape),
                initializer=initializer,
                # Rounded maps would not be inverses of each other.
                dtype=wide_dtype(self.variable_dtype),
                trainable=False,
                autocast=False,
            )

        self._query_map = weight("query_map", identity, dim, dim)
        self._key_map = weight("key_map", identity, dim, dim)
        self._query_center = weight("query_center", "zeros", dim)
        self._key_center = weight("key_center", "zeros", dim)
        self._unseen_variance = weight("unseen_variance", "zeros", dim)
        if self.random:
            self._seen = weight("seen", "ones", dim)
            self._shape = weight("shape", "zeros", dim)

    def coordinates(self, query, key):
        """Queries and centred keys, in the coordinates of the features.

        Their dot products change by a constant per query only, which cancels in the
        normalisation.

        Args:
            query, key: `(batch, length, heads, dim)`.

        Returns:
            Two tensors of the same shapes.
        """
        query = ops.einsum("bthd,hde->bthe", query, _cast(self._query_map, query))
        key = key - _cast(self._key_center, key)
        return query, ops.einsum("bthd,hde->bthe", key, _cast(self._key_map, key))

    def map_weights(self, x):
        """The tensors that the feature maps read, in the layout of chunks."""
        own = [self._query_center, self._unseen_variance]
        if self.random:
            own += [self._seen, self._shape]
        return tuple(_cast(weight, x)[:, None, None] for weight in own)

    def assign(self, moments, features, rank):
        """Fits all weights, in closed form.

        Args:
            moments: `FarMoments`.
            features: Number of features.
            rank: Number of coordinates that features see, or `None` for the best
                number for random features.

        Returns:
            Array `(heads,)`: the root mean square of `q·k` about the means.
        """
        query, key = moments.query, moments.key
        query_map, key_map, variance = balanced_coordinates(
            query.covariance, key.covariance
        )
        center = np.einsum("hd,hde->he", query.mean, query_map)
        if rank is None:
            seen = worth_seeing(variance, features)
        else:
            seen = np.broadcast_to(np.arange(self.sizes[1]) < rank, variance.shape)
        self._query_map.assign(query_map)
        self._key_map.assign(key_map)
        self._query_center.assign(center)
        self._key_center.assign(key.mean)
        self._unseen_variance.assign(np.where(seen, 0.0, variance))
        if self.random:
            self._seen.assign(seen.astype("float32"))
            shape = (1.0 - sampling_variance(variance)) / 4.0
            self._shape.assign(np.where(seen, shape, 0.0))
        return np.sqrt(np.square(variance).sum(-1))


class FarMoments:
    """Means and covariances of the queries and keys that features have to estimate.

    A pair of a query and a key counts with its softmax attention weight, and not at all
    if a window attends to it exactly. Most pairs of a trained layer have small weights
    and need not be estimated well.

    Args:
        window: As for `PerformerAttention`.
        causal: Whether queries see no later keys.

    Attributes:
        query, key: `Moments`, by head.
    """

    def __init__(self, window, causal):
        self.window, self.causal = window, causal
        self.query, self.key = Moments(), Moments()

    def add(self, query, key, query_mask, key_mask):
        """Adds a batch to the moments.

        Args:
            query, key: Arrays `(batch, length, heads, dim)`, as the features receive
                them. Positions that are not finite do not count.
            query_mask, key_mask: Boolean arrays `(batch, length)`.
        """
        for row in range(len(query)):
            query_positions, key_positions = (
                np.flatnonzero(mask[row] & np.isfinite(x[row]).all((1, 2)))
                for x, mask in ((query, query_mask), (key, key_mask))
            )
            if not len(query_positions) or not len(key_positions):
                continue
            stride = -(-len(query_positions) // MOST_QUERIES)
            query_positions = query_positions[::stride]
            queries = query[row][query_positions].astype("float64")
            keys = key[row][key_positions].astype("float64")
            steps = query_positions[:, None] - key_positions
            weights = self._far_weights(queries, keys, steps)
            self.query.add(queries, weights.sum(2))
            self.key.add(keys, weights.sum(1))

    def _far_weights(self, query, key, steps):
        """Softmax attention to the keys that features estimate, `(heads, t, s)`."""
        logits = np.einsum("thd,shd->hts", query, key, optimize=True)
        if self.causal:
            logits = np.where(steps >= 0, logits, -np.inf)
        largest = logits.max(-1, keepdims=True)
        # A causal query whose keys are all hidden sees none.
        weights = np.exp(logits - np.where(np.isfinite(largest), largest, 0.0))
        totals = weights.sum(-1, keepdims=True)
        weights = weights / np.where(totals > 0, totals, 1.0)
        if self.window is None:
            return weights
        return np.where(abs(steps) < self.window, 0.0, weights)


class Moments:
    """Weighted means and covariances of vectors, per head, over batches.

    Attributes:
        weight: Sum of the weights, `(heads,)`, or 0.
    """

    def __init__(self):
        self.weight, self._sum, self._squares = 0.0, 0.0, 0.0

    def add(self, vectors, weights):
        """Adds vectors `(number, heads, dim)` with weights `(heads, number)`."""
        weighted = vectors * weights.T[..., None]
        self.weight = self.weight + weights.sum(1)
        self._sum = self._sum + weighted.sum(0)
        self._squares = self._squares + np.einsum(
            "nhd,nhe->hde", weighted, vectors, optimize=True
        )

    @property
    def mean(self):
        """`(heads, dim)`."""
        return self._sum / self.weight[:, None]

    @property
    def covariance(self):
        """`(heads, dim, dim)`."""
        mean = self.mean
        squares = self._squares / self.weight[:, None, None]
        return squares - mean[:, :, None] * mean[:, None, :]


def balanced_coordinates(query_covariance, key_covariance):
    """Coordinates in which queries and keys have the same diagonal covariance.

    Among all pairs of maps that preserve dot products, this one minimises `E‖q + k‖²`,
    and with it the variance of random features.

    Args:
        query_covariance, key_covariance: Arrays `(heads, dim, dim)`.

    Returns:
        `(query_map, key_map, variance)`: matrices `(heads, dim, dim)` to multiply with
        from the right, each the inverse of the other's transpose, and the variances
        `(heads, dim)`, in decreasing order.
    """
    root, inverse = _roots(query_covariance)
    # The geometric mean of the keys' covariance and the inverse of the queries'.
    metric = inverse @ _roots(root @ _floor(key_covariance) @ root)[0] @ inverse
    query_map, key_map = _roots(metric)
    shared = query_map @ _floor(query_covariance) @ query_map
    variance, rotation = np.linalg.eigh(shared)
    variance, rotation = variance[:, ::-1], rotation[:, :, ::-1]
    return query_map @ rotation, key_map @ rotation, np.maximum(variance, 0.0)


def sampling_variance(variance):
    """The variance to draw random features with, per coordinate.

    It minimises `E log` of the second moment of the estimate of `exp(q·k)`, `½ log(s² /
    (2s − 1)) + 2 variance / (2s − 1)`, for queries and keys of that variance. This is
    FAVOR++ with a precomputed shape per coordinate.

    Args:
        variance: Array.

    Returns:
        Array of the same shape, at least 1.
    """
    half = 3.0 + 4.0 * variance
    return (half + np.sqrt(np.square(half) - 8.0)) / 4.0


def worth_seeing(variance, features):
    """Selects the coordinates that random features should see.

    Adding a coordinate multiplies the variance of the estimate. Dropping one drops its
    part of `q·k`, whose variance is `variance²`. The selection minimises the sum of
    both errors for Gaussian queries and keys.

    Args:
        variance: Array `(heads, dim)`, in decreasing order.
        features: Number of features.

    Returns:
        Boolean array `(heads, dim)`: the first coordinates of each head, at least one.
    """
    s = sampling_variance(variance)
    log_moments = 0.5 * np.log(s * s / (2 * s - 1)) + 2 * variance / (2 * s - 1)
    noise = np.expm1(np.minimum(np.cumsum(log_moments, -1), LARGEST_EXPONENT))
    left_out = np.square(variance).sum(-1, keepdims=True) - np.cumsum(
        np.square(variance), -1
    )
    bias = np.expm1(np.clip(left_out, 0.0, LARGEST_EXPONENT))
    best = np.argmin(noise / features + bias, -1)
    return np.arange(variance.shape[-1]) <= best[:, None]


def _roots(matrices):
    """The square roots of covariances and the inverses of these."""
    values, vectors = np.linalg.eigh(_floor(matrices))
    roots = np.sqrt(np.maximum(values, 1e-30))[:, None]
    transposed = np.swapaxes(vectors, 1, 2)
    return (vectors * roots) @ transposed, (vectors / roots) @ transposed


def _floor(matrices):
    """Covariances with a minimum variance in every direction."""
    dim = matrices.shape[-1]
    mean = np.trace(matrices, axis1=1, axis2=2)[:, None, None] / dim
    return matrices + LEAST_VARIANCE * np.where(mean > 0, mean, 1.0) * np.eye(dim)


def _cast(weight, x):
    return ops.cast(ops.convert_to_tensor(weight), x.dtype)
