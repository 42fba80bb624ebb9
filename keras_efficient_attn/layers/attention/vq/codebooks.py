"""Codebooks of VQAttention: moving averages of keys, or the means of a mixture.

Also the metric in which keys are compared with hard codes.
"""

import dataclasses
import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.arguments import identity
from keras_efficient_attn.layers.options import Options
from keras_efficient_attn.layers.replicas import (
    sum_over_replicas,
    take_first_replica,
)
from keras_efficient_attn.ops.common.checks import (
    check_name,
    check_positive_int,
    check_positive_number,
    check_weight,
)
from keras_efficient_attn.ops.common.numerics import wide_dtype
from keras_efficient_attn.ops.common.random import uniform
from keras_efficient_attn.ops.vq_attention.calibration import fit_mixture
from keras_efficient_attn.ops.vq_attention.codebook import (
    batch_statistics,
    codes_of,
    draw_once,
    enough_keys,
    random_keys,
    update_averages,
)

# Options of one assignment only.
HARD_ONLY = ("momentum", "commitment_weight", "revive_after")
SOFT_ONLY = ("sigma", "learn_sigma", "learn_weights")


@dataclasses.dataclass(frozen=True)
class CodeOptions(Options):
    """How keys are assigned to the codes of `VQAttention`, and how codes are learned.

    Args:
        assignment: `"hard"` (the default): each key has the code nearest to it, a
            moving average of such keys. Or `"soft"`: each key has every code with a
            weight, and codes are trained like other weights.
        init: `"first_batch"`: by k-means++ from the keys of the first training call,
            and random until then; the default for hard codes. Or `"random"`, the only
            choice and the default for soft codes.
        momentum: Factor of the moving averages of hard codes in each training call.
            Defaults to 0.99.
        commitment_weight: Factor of the commitment loss of hard codes in training.
            Defaults to 1e-4.
        revive_after: Number of training calls without a key after which a hard code,
            with its sum and count, moves to a random key of the batch; `None`: never.
            Defaults to 100.
        sigma: Width of soft codes, in the units of scaled keys, whose norm is
            `key_dim^(1/4)`. Defaults to 1.
        learn_sigma: Whether each soft code learns its own width, starting from `sigma`.
            Defaults to `False`.
        learn_weights: Whether each soft code learns its weight in the mixture;
            otherwise all weights are equal. Defaults to `False`.

    Raises:
        ValueError: For options that are invalid, or that the assignment does not use.

    Example:

    >>> from keras_efficient_attn import CodeOptions, VQAttention
    >>> codes = CodeOptions("soft", learn_sigma=True)
    >>> layer = VQAttention(num_heads=4, key_dim=32, num_codes=64, codes=codes)
    """

    assignment: str = "hard"
    init: str | None = None
    momentum: float = 0.99
    commitment_weight: float = 1e-4
    revive_after: int | None = 100
    sigma: float = 1.0
    learn_sigma: bool = False
    learn_weights: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_name("assignment", self.assignment, ("hard", "soft"))
        check_positive_int("revive_after", self.revive_after, optional=True)
        unused = HARD_ONLY if self.is_soft else SOFT_ONLY
        for field in dataclasses.fields(self):
            received = getattr(self, field.name)
            if field.name in unused and received != field.default:
                raise ValueError(
                    f"`{field.name}` does not apply to assignment={self.assignment!r}. "
                    f"Received: {field.name}={received!r}"
                )
        if self.init is not None:
            check_name("init", self.init, ("first_batch", "random"))
        if self.is_soft and self.init == "first_batch":
            raise ValueError(
                "init='first_batch' does not apply to assignment='soft': use "
                "init='random', or call `calibrate`. Received: init='first_batch'"
            )
        check_positive_number("sigma", self.sigma)
        if not 0 < self.momentum < 1:
            raise ValueError(
                "`momentum` must be a number between 0 and 1. Received: "
                f"momentum={self.momentum!r}"
            )
        check_weight("commitment_weight", self.commitment_weight)

    @property
    def is_soft(self):
        """Whether each key is assigned to every code with a weight."""
        return self.assignment == "soft"


class _RandomCodes(keras.initializers.Initializer):
    """Random directions, with the norm of normalised and scaled keys."""

    def __init__(self, seed):
        self.normal = keras.initializers.RandomNormal(stddev=1.0, seed=seed)

    def __call__(self, shape, dtype=None):
        dim = shape[-1]
        codes = self.normal(shape, "float32")
        norm = ops.sqrt(ops.sum(ops.square(codes), axis=-1, keepdims=True))
        return ops.cast(codes / norm * dim**0.25, dtype)


class MixtureCodebook(keras.layers.Layer):
    """Codes trained like any weight: the means of a mixture of Gaussians.

    Args:
        num_heads, dim: Number of heads and their size.
        num_codes: Codes per head.
        options: `CodeOptions`, with its `sigma`: the standard deviation of the
            Gaussians around the codes.
        seed: Seed of the random codes.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, num_heads, dim, num_codes, options, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.shape = (num_heads, num_codes, dim)
        self.initial_sigma = options.sigma
        self.learn_sigma = options.learn_sigma
        self.learn_weights = options.learn_weights
        self.seed = seed

    def build(self, input_shape=None):
        dtype = wide_dtype(self.variable_dtype)
        self._codes = self.add_weight(
            name="codes",
            shape=self.shape,
            initializer=_RandomCodes(self.seed),
            dtype=dtype,
            autocast=False,
        )

        def per_code(name, value):
            return self.add_weight(
                name=name,
                shape=self.shape[:2],
                initializer=keras.initializers.Constant(value),
                dtype=dtype,
                autocast=False,
            )

        self._log_sigma = self._log_weights = None
        if self.learn_sigma:
            self._log_sigma = per_code("log_sigma", math.log(self.initial_sigma))
        if self.learn_weights:
            self._log_weights = per_code("log_weights", -math.log(self.shape[1]))

    @property
    def codes(self):
        return ops.convert_to_tensor(self._codes)

    @property
    def sigma(self):
        """Standard deviation of each code, `(heads, codes)`."""
        if self._log_sigma is not None:
            return ops.exp(ops.convert_to_tensor(self._log_sigma))
        return ops.full(self.shape[:2], self.initial_sigma, self._codes.dtype)

    @property
    def log_weights(self):
        """Logarithms of the codes' weights, `(heads, codes)`; `None` if all equal."""
        if self._log_weights is None:
            return None
        return ops.convert_to_tensor(self._log_weights)

    def assign(self, codes):
        self._codes.assign(codes)

    def fit(self, keys, codes, iterations):
        """Sets the codes and fits learned widths and weights by EM.

        Args:
            keys: Array `(keys, heads, dim)`.
            codes: Initial codes, `(heads, codes, dim)`.
            iterations: Iterations of expectation-maximisation (EM).
        """
        if self.learn_sigma or self.learn_weights:
            sigma = None if self.learn_sigma else self.initial_sigma
            codes, sigma, weights = fit_mixture(
                keys, codes, sigma, self.learn_weights, iterations
            )
            if self.learn_sigma:
                self._log_sigma.assign(np.log(sigma))
            if self.learn_weights:
                self._log_weights.assign(np.log(weights))
        self.assign(codes)


class MovingCodebook(keras.layers.Layer):
    """Codes that are moving averages of the keys nearest to them.

    `code = sum / count`, where `sum` and `count` are exponential moving averages, over
    training calls, of the sum and the number of a code's keys. On TensorFlow and
    PyTorch the statistics are summed over replicas; on JAX they are global already.

    Args:
        num_heads, dim: Number of heads and their size.
        num_codes: Codes per head.
        options: `CodeOptions`.
        seed: Seed of the random codes and of the drawn keys.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, num_heads, dim, num_codes, options, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.shape = (num_heads, num_codes, dim)
        self.draws_codes = options.init != "random"
        self.momentum = options.momentum
        self.revive_after = options.revive_after
        self.seed = seed

    def build(self, input_shape=None):
        heads, codes, _ = self.shape

        def statistic(name, shape, initializer):
            return self.add_weight(
                name=name,
                shape=shape,
                initializer=initializer,
                dtype=wide_dtype(self.variable_dtype),
                trainable=False,
                # An assignment must reach the weight, not a cast copy.
                autocast=False,
                aggregation="only_first_replica",
            )

        self._sum = statistic("sum", self.shape, _RandomCodes(self.seed))
        self._count = statistic("count", (heads, codes), "ones")
        # The value of `count` without revivals.
        one_key = keras.initializers.Constant(1.0 - self.momentum)
        self._usage = statistic("usage", (heads, codes), one_key)
        # Training calls since each code's last key.
        self._idle = statistic("idle_calls", (heads, codes), "zeros")
        # Moving averages of the squared norms of errors and of keys.
        self._error = statistic("error", (heads, 2), "zeros")
        # For gradient checkpointing, which reruns the last call.
        self._last = statistic("last_codes", self.shape, "zeros")
        self._drawn = None
        if self.draws_codes:
            self._drawn = statistic("drawn", (), "zeros")
        self._generator = keras.random.SeedGenerator(self.seed)

    @property
    def codes(self):
        sums, counts = (ops.convert_to_tensor(w) for w in (self._sum, self._count))
        return codes_of(sums, counts)

    @property
    def last_codes(self):
        """The codes that the last training call used, before they moved."""
        return ops.convert_to_tensor(self._last)

    def assign(self, codes):
        """Sets the codes, each with the statistics of one key."""
        self._sum.assign(codes)
        self._count.assign(np.ones(self._count.shape))
        self._usage.assign(np.full(self._usage.shape, 1.0 - self.momentum))
        self._idle.assign(np.zeros(self._idle.shape))
        if self._drawn is not None:
            self._drawn.assign(1.0)

    def drawn_from(self, key, valid):
        """The codes; the first call draws them from these keys by k-means++.

        Args:
            key: `(batch, length, heads, dim)`.
            valid: `(batch, length)`, 0 for keys to exclude.
        """
        if self._drawn is None:
            return self.codes
        heads, codes, dim = self.shape
        dtype = self._sum.dtype
        keys = ops.reshape(ops.stop_gradient(ops.cast(key, dtype)), (-1, heads, dim))
        valid = ops.reshape(ops.cast(valid, dtype), (-1,))
        keys, valid = enough_keys(keys, valid, codes)
        uniforms = uniform((codes, heads), self._generator)
        drawn = ops.convert_to_tensor(self._drawn) > 0
        new = draw_once(
            ops.convert_to_tensor(self._sum),
            drawn,
            keys,
            valid,
            ops.cast(uniforms, dtype),
        )
        new = take_first_replica(new)
        # Without keys there is nothing to draw from yet.
        found = take_first_replica(ops.sum(valid)) > 0
        # The counts have decayed in calls without keys.
        count = ops.convert_to_tensor(self._count)
        first = ops.logical_and(found, ops.logical_not(drawn))
        count = ops.where(first, ops.ones_like(count), count)
        self._sum.assign(new)
        self._count.assign(count)
        self._drawn.assign(ops.cast(ops.logical_or(drawn, found), dtype))
        return codes_of(new, count)

    def update(self, key, index, valid, codes):
        """Moves the averages towards a batch of keys.

        Args:
            key: `(batch, length, heads, dim)`.
            index: int32 `(batch, length, heads)`, the codes nearest to them.
            valid: `(batch, length)`, 0 for keys to ignore.
            codes: The codes that `index` was found with.
        """
        dtype = self._sum.dtype
        key = ops.stop_gradient(ops.cast(key, dtype))
        valid, codes = ops.cast(valid, dtype), ops.cast(codes, dtype)
        statistics = batch_statistics(key, index, valid, codes)
        counts, sums, squares = (sum_over_replicas(t) for t in statistics)
        new_sum, new_count = update_averages(
            ops.convert_to_tensor(self._sum),
            ops.convert_to_tensor(self._count),
            sums,
            counts,
            self.momentum,
        )
        idle = ops.where(counts > 0, 0.0, ops.convert_to_tensor(self._idle) + 1.0)
        self._error.assign(self._average(self._error, squares))
        if self.revive_after is not None:
            dead = idle > self.revive_after
            new_sum, new_count = self._revive(new_sum, new_count, dead, key, valid)
        self._last.assign(codes)
        self._sum.assign(new_sum)
        self._count.assign(new_count)
        self._usage.assign(self._average(self._usage, counts))
        self._idle.assign(idle)

    def _average(self, weight, new):
        return (
            self.momentum * ops.convert_to_tensor(weight) + (1.0 - self.momentum) * new
        )

    def _revive(self, sums, counts, dead, key, valid):
        """Moves dead codes to random unmasked keys, with the average count."""
        uniforms = uniform(counts.shape, self._generator)
        drawn, seen = random_keys(key, valid, uniforms)
        drawn, seen = take_first_replica(drawn), take_first_replica(seen)
        dead = ops.logical_and(dead, seen > 0)
        refill = ops.sum(counts, axis=-1, keepdims=True) / counts.shape[-1]
        refill = refill * ops.ones_like(counts)
        sums = ops.where(dead[..., None], drawn * refill[..., None], sums)
        return sums, ops.where(dead, refill, counts)

    def idle_calls(self):
        """Training calls since each code's last key, as an array."""
        return ops.convert_to_numpy(self._idle)

    def usage(self):
        """The moving average of the number of keys per code, as an array."""
        return ops.convert_to_numpy(self._usage)

    def relative_error(self):
        """`√(Σ‖key − code‖² / Σ‖key‖²)` of each head, as an array."""
        error, energy = np.moveaxis(ops.convert_to_numpy(self._error), -1, 0)
        return np.sqrt(error / np.where(energy > 0, energy, 1.0))


class Coordinates(keras.layers.Layer):
    """Coordinates of queries and keys that preserve their products, and a metric.

    Each head has a matrix for its queries and one for its keys; each is the inverse
    of the other's transpose. Both are the identity until `assign`. Keys are compared
    with codes by their distance in these coordinates.

    Args:
        num_heads, dim: Number of heads and their size.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, num_heads, dim, **kwargs):
        super().__init__(**kwargs)
        self.shape = (num_heads, dim, dim)

    def build(self, input_shape=None):
        self._query_map, self._key_map = (
            self.add_weight(
                name=name,
                shape=self.shape,
                initializer=identity,
                dtype=wide_dtype(self.variable_dtype),
                trainable=False,
                autocast=False,
            )
            for name in ("query_map", "key_map")
        )

    def metric(self, dtype):
        """`M`, `(heads, dim, dim)`, of the squared distance `(k − c) M (k − c)ᵀ`."""
        key_map = ops.cast(ops.convert_to_tensor(self._key_map), dtype)
        return key_map @ ops.swapaxes(key_map, -1, -2)

    def map(self, query, key, codes):
        """Queries and keys `(batch, length, heads, dim)`, and `(heads, codes, dim)`."""
        query_map, key_map = (
            ops.cast(ops.convert_to_tensor(weight), query.dtype)
            for weight in (self._query_map, self._key_map)
        )
        query = ops.einsum("bthd,hde->bthe", query, query_map)
        return query, ops.einsum("bthd,hde->bthe", key, key_map), codes @ key_map

    def assign(self, query_map, key_map):
        self._query_map.assign(query_map)
        self._key_map.assign(key_map)
