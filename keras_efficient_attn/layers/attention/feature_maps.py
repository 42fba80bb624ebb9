"""Feature maps of linear attention, as objects found by name.

The functions that compute features are in `ops.feature_maps`. An object selects one of
them, checks its arguments, and declares the weights that it reads.
"""

import dataclasses
import functools
import random

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import identity
from keras_efficient_attn.layers.attention.registry import add_named
from keras_efficient_attn.ops.common import random_features
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_positive_int,
    check_positive_number,
)
from keras_efficient_attn.ops.common.feature_kernels import entrywise
from keras_efficient_attn.ops.common.numerics import NORM_EPSILON, wide_dtype
from keras_efficient_attn.ops.common.random_features import ROW_NORMS
from keras_efficient_attn.ops.linear_attention import (
    feature_maps as functions,
)

# Kinds of `ProjectedFeatures`: features by head_dim, names of matrices and of biases.
PROJECTED = {
    "product": (1, ("kernel", "other_kernel"), ("bias", "other_bias")),
    "hedgehog": (2, ("kernel",), ("bias",)),
    "relu": (1, ("kernel",), ()),
    "dpfp": (8, (), ()),
}
_CLASSES = {}


def register_feature_map(name, package="Custom"):
    """Class decorator: registers a `FeatureMap` by name, and with Keras for saving.

    Args:
        name: The name to pass to layers as `feature_map`.
        package: Package of the class in saved files. Defaults to `"Custom"`.

    Raises:
        ValueError: If another class has the name.
    """

    def register(feature_map):
        add_named(_CLASSES, name, feature_map)
        feature_map.name = name
        return keras.saving.register_keras_serializable(package)(feature_map)

    return register


def names(attribute=None):
    """The names that `get` knows, as a tuple.

    Args:
        attribute: A boolean attribute of `FeatureMap`; only classes for which it is
            true are listed. Defaults to `None`: all names.
    """
    if attribute is None:
        return tuple(_CLASSES)
    # Read class attributes: an object may need arguments.
    return tuple(n for n, c in _CLASSES.items() if getattr(c, attribute) is True)


def get(identifier, **options):
    """The feature map for an identifier.

    Args:
        identifier: A name, a `FeatureMap`, or a function without weights that maps
            `(..., head_dim)` to non-negative features `(..., num_features)`.
        **options: Arguments of a map given by name; for a function, `num_features`,
            which defaults to `head_dim`.

    Raises:
        ValueError: For an unknown name, or options of another map.
        TypeError: For a `FeatureMap` with an argument that is not hashable.

    Example:

    >>> from keras_efficient_attn.layers import feature_maps
    >>> feature_maps.get("taylor", order=4)
    TaylorFeatures(order=4)
    """
    if isinstance(identifier, str) and identifier in _CLASSES:
        feature_map = _CLASSES[identifier]
        known = {field.name for field in dataclasses.fields(feature_map)}
    elif isinstance(identifier, FeatureMap):
        feature_map, known = lambda: identifier, ()
    elif isinstance(identifier, keras.Layer):
        raise ValueError(
            "`feature_map` must be a name, a `FeatureMap` or a function, and not a "
            "Keras layer: for a map with weights, subclass `FeatureMap`. Received: "
            f"feature_map={identifier}"
        )
    elif callable(identifier):
        known = ("num_features",)

        def feature_map(**options):
            return FunctionFeatures(identifier, **options)
    else:
        raise ValueError(
            f"`feature_map` must be one of {', '.join(_CLASSES)}, a `FeatureMap`, or "
            f"a callable. Received: feature_map={identifier!r}"
        )
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"feature_map={identifier!r} has no option `{option}`: leave it out. "
                f"Received: {option}={value!r}"
            )
    made = feature_map(**options)
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                "The arguments of a `FeatureMap` must be hashable: use tuples instead "
                f"of lists or arrays. Received: {type(made).__name__} with "
                f"{field.name}={value!r}"
            ) from error
    return made


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """A map `φ` of queries and keys whose dot products are the attention's weights.

    A subclass implements `query_features`, and `key_features` if keys have another map.
    A map with arguments is a frozen dataclass. It holds no tensors: `create_weights`
    creates the weights, which are passed to its functions. So equal maps are one object
    for a compiler, and gradients reach the weights through the scan over chunks.

    Attributes:
        name: The registered name.
        positive: Whether `φ(q)·φ(k)` is never negative. Defaults to `True`.
        causal: Whether the features of a position depend on that position alone.
            Defaults to `True`.
        estimates_softmax: Whether `φ(q)·φ(k)` estimates `exp(q·k)`. Layers then scale
            queries and keys by `head_dim^(-1/4)`. Defaults to `False`.
        random: Whether the map has a weight `"projection"` of random rows. Defaults to
            `False`.
        can_calibrate: Whether the map has a form centred at the means of queries and
            keys. See `CalibratedFeatures`. Defaults to `False`.
        rowwise: Whether the functions work on the last axis of any array, and read
            weights that are matrices, so that a kernel can compute features on the fly.
            Defaults to `False`.
        entrywise: A method `(x, *weights) -> Entrywise` for maps that apply one
            function to each entry of `x` or of a product with it, the same for queries
            and keys; `x` has their dtype. GPU kernels compute these maps. Not inherited
            if a subclass overrides the functions. Defaults to `None`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.layers import FeatureMap, LinearAttention
    >>> from keras_efficient_attn.layers import register_feature_map
    >>> @register_feature_map("gained_relu")
    ... class GainedRelu(FeatureMap):
    ...     def create_weights(self, layer, seed):
    ...         shape = (layer.num_heads, 1, 1, layer.key_dim)
    ...         return (layer.add_weight(shape, "ones", name="feature_gain"),)
    ...
    ...     def query_features(self, x, gain):
    ...         return keras.ops.relu(gain * x) + 1e-3, None
    >>> layer = LinearAttention(num_heads=2, key_dim=8, feature_map="gained_relu")
    """

    positive = True
    causal = True
    estimates_softmax = False
    random = False
    can_calibrate = False
    rowwise = False
    entrywise = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.__dict__.get("name"), property):
            cls.name = cls.__name__
        if {"query_features", "key_features"} & set(cls.__dict__):
            cls.entrywise = cls.__dict__.get("entrywise")

    def feature_dim(self, head_dim):
        """Number of features for a head size. Defaults to `head_dim`.

        Raises:
            ValueError: If the arguments do not fit the head size.
        """
        return head_dim

    def create_weights(self, layer, seed):
        """Creates the weights, by `layer.add_weight`.

        Args:
            layer: The layer that owns them, with `num_heads` and `key_dim`.
            seed: `keras.random.SeedGenerator` if the map is `random`, or `None`.

        Returns:
            Tuple of variables. The feature functions receive them as tensors in the
            dtype of `x`.
        """
        return ()

    def map_weights(self, weights, query, key, call):
        """Tensors for the functions to read, from the weights and the call.

        Args:
            weights: Tuple of tensors, from `create_weights`.
            query, key: `(batch, length, heads, head_dim)`, scaled.
            call: `AttentionCall`, with the masks.

        Returns:
            Tuple of tensors. Defaults to `weights`.
        """
        return weights

    def query_features(self, x, *weights):
        """Features of queries.

        Args:
            x: `(batch, heads, chunks, chunk_size, head_dim)`.
            *weights: From `map_weights`.

        Returns:
            `(features, log_scale)`: `(..., feature_dim)`, and `(...)` or `None` for
            zero. The true features are `features * exp(log_scale)`.
        """
        raise NotImplementedError

    def key_features(self, x, *weights):
        """Features of keys. Defaults to the queries' features."""
        return self.query_features(x, *weights)

    def multiplications(self, head_dim):
        """Multiply-adds in matrix products for the features of one head's vector."""
        return 0

    def get_config(self):
        """The arguments, as a dict."""
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def _in_layer(function, **options):
    """A function of `ops.feature_maps` without its check for symbolic inputs."""
    function = function.__wrapped__
    return staticmethod(functools.partial(function, **options) if options else function)


def _register(name):
    return register_feature_map(name, package="keras_efficient_attn")


@dataclasses.dataclass(frozen=True)
class RandomFeatures(FeatureMap):
    """Base of maps with a projection whose rows are random.

    Args:
        num_features: Number of features. Defaults to `max(256, d · ln(d))` for heads
            of size `d`.
        orthogonal: Whether rows are orthogonal in blocks of `d`. Defaults to `True`.
        row_norm: `"chi"` (unbiased, the default) or `"sqrt_dim"`.
    """

    num_features: int | None = None
    orthogonal: bool = True
    row_norm: str = "chi"

    random = True
    estimates_softmax = True
    features_per_row = 1

    def __post_init__(self):
        check_positive_int("num_features", self.num_features, optional=True)
        if (self.num_features or 0) % self.features_per_row:
            raise ValueError(
                f"`num_features` must be even for feature_map={self.name!r}, which "
                "makes two features of each random vector. Received: "
                f"num_features={self.num_features}"
            )
        check_bool("orthogonal", self.orthogonal)
        check_name("row_norm", self.row_norm, ROW_NORMS)

    def feature_dim(self, head_dim):
        return self.features_per_row * self.num_rows(head_dim)

    def num_rows(self, head_dim):
        """Rows of the projection."""
        size = self.num_features or random_features.default_num_features(head_dim)
        return size // self.features_per_row

    def draw(self, head_dim, seed):
        """Random numbers, from which `project` makes a projection."""
        rows = self.num_rows(head_dim)
        return random_features.gaussian_blocks(rows, head_dim, seed)

    def project(self, draws, dtype):
        """The projection `(rows, head_dim)` of draws."""
        projection = random_features.random_projection(
            *draws, self.orthogonal, self.row_norm
        )
        return keras.ops.cast(projection, dtype)

    def create_weights(self, layer, seed):
        projection = layer.add_weight(
            name="projection",
            shape=(self.num_rows(layer.key_dim), layer.key_dim),
            initializer=lambda shape, dtype: self.project(
                self.draw(layer.key_dim, seed), dtype
            ),
            # Rounded rows would not be orthogonal.
            dtype=wide_dtype(layer.variable_dtype),
            trainable=False,
            # Not cast to the compute dtype: assignments have to reach the variable.
        )
        return (projection,)

    def multiplications(self, head_dim):
        return head_dim * self.num_rows(head_dim)


@_register("favor+")
class FavorPlusFeatures(RandomFeatures):
    """`ops.feature_maps.positive_random_features`."""

    can_calibrate = True
    rowwise = True
    _hyperbolic = False

    query_features = _in_layer(functions.positive_random_features)
    entrywise = staticmethod(entrywise.positive_random_entries)

    def calibrated_features(self, x, rank, seen, shape, projection):
        """Features of a calibrated layer, of the coordinates where `seen` is 1."""
        return functions.optimal_positive_features(
            x * seen, projection, shape, self._hyperbolic
        )


@_register("hyperbolic")
class HyperbolicFeatures(FavorPlusFeatures):
    """`ops.feature_maps.positive_random_features` with both signs of each row."""

    features_per_row = 2
    _hyperbolic = True

    query_features = _in_layer(functions.positive_random_features, hyperbolic=True)
    entrywise = staticmethod(
        functools.partial(entrywise.positive_random_entries, hyperbolic=True)
    )


@_register("favor++")
class FavorPlusPlusFeatures(RandomFeatures):
    """`ops.feature_maps.optimal_positive_features`, from a sequence's statistics."""

    causal = False

    def map_weights(self, weights, query, key, call):
        shape = functions.optimal_shape(query, key, call.query_mask, call.key_mask)
        return (*weights, shape[..., None, None, None])

    def query_features(self, x, projection, shape):
        return functions.optimal_positive_features(x, projection, shape)


@_register("trigonometric")
class TrigonometricFeatures(RandomFeatures):
    """`ops.feature_maps.trigonometric_features`."""

    positive = False
    features_per_row = 2

    def query_features(self, x, projection):
        return functions.trigonometric_features(x, projection)


@dataclasses.dataclass(frozen=True)
class PolynomialFeatures(FeatureMap):
    """Base of maps of all monomials up to a degree.

    Args:
        order: The degree, even. Defaults to 2.
    """

    order: int = 2

    estimates_softmax = True
    can_calibrate = True

    def __post_init__(self):
        check_positive_int("order", self.order)
        if self.order % 2:
            raise ValueError(
                "`order` must be even: odd orders give negative weights. Received: "
                f"order={self.order}"
            )

    def feature_dim(self, head_dim):
        return functions.polynomial_dimension(head_dim, self.order)

    def calibrated_features(self, x, rank):
        """Features of a calibrated layer, of the first `rank` coordinates."""
        return self.query_features(x[..., :rank])


@_register("taylor")
class TaylorFeatures(PolynomialFeatures):
    """`ops.feature_maps.taylor_features`."""

    def query_features(self, x):
        return functions.taylor_features(x, self.order)


@_register("power")
class PowerFeatures(PolynomialFeatures):
    """`ops.feature_maps.power_features`."""

    def query_features(self, x):
        return functions.power_features(x, self.order)


@_register("relu")
@dataclasses.dataclass(frozen=True)
class ReluFeatures(RandomFeatures):
    """`ops.feature_maps.relu_features`, of a random projection with `num_features`.

    Args:
        num_features: Rows of the projection. Defaults to `None`: no projection.
        orthogonal, row_norm: As `RandomFeatures`, for a projection.
    """

    estimates_softmax = False
    rowwise = True

    def __post_init__(self):
        super().__post_init__()
        drawn = self.orthogonal is not True or self.row_norm != "chi"
        if drawn and not self.random:
            raise ValueError(
                "feature_map='relu' uses `orthogonal` and `row_norm` only with "
                "`num_features`: give it, or leave them out. Received: "
                f"orthogonal={self.orthogonal!r}, row_norm={self.row_norm!r}"
            )

    @property
    def random(self):
        return self.num_features is not None

    def num_rows(self, head_dim):
        return self.num_features or 0

    def feature_dim(self, head_dim):
        return self.num_features or head_dim

    def create_weights(self, layer, seed):
        return super().create_weights(layer, seed) if self.random else ()

    def query_features(self, x, projection=None):
        return functions.relu_features(x, projection)

    def entrywise(self, x, projection=None):
        return entrywise.relu_entries(x, projection)


@_register("elu")
class EluFeatures(FeatureMap):
    """`ops.feature_maps.elu_features`: elu(x) + 1."""

    rowwise = True
    query_features = _in_layer(functions.elu_features)
    entrywise = staticmethod(entrywise.elu_entries)


@_register("exp")
class ExponentialFeatures(FeatureMap):
    """`ops.feature_maps.exponential_features`: exp(x)."""

    rowwise = True
    query_features = staticmethod(functions.exponential_features)
    entrywise = staticmethod(entrywise.exponential_entries)


@_register("identity")
class IdentityFeatures(FeatureMap):
    """The identity: queries and keys unchanged."""

    positive = False
    rowwise = True

    def query_features(self, x):
        return x, None

    def entrywise(self, x):
        return entrywise.Entrywise("identity")


@_register("unit")
@dataclasses.dataclass(frozen=True)
class UnitFeatures(FeatureMap):
    """`ops.feature_maps.unit_features`: x / ‖x‖, the keys of the delta rule.

    Args:
        epsilon: Added to the mean square of `x`. Defaults to 1e-3, which bounds the
            derivative at zero.
    """

    epsilon: float = NORM_EPSILON

    positive = False
    rowwise = True

    def __post_init__(self):
        check_positive_number("epsilon", self.epsilon)

    @property
    def query_features(self):
        return functools.partial(
            functions.unit_features.__wrapped__, epsilon=self.epsilon
        )


@_register("sum")
class SumFeatures(FeatureMap):
    """`ops.feature_maps.sum_features`: x / Σ|x|, other keys of the delta rule."""

    positive = False
    rowwise = True
    query_features = _in_layer(functions.sum_features)


@_register("softmax")
class SoftmaxFeatures(FeatureMap):
    """Softmax over the features of queries, exponential of keys."""

    query_features = staticmethod(functions.softmax_query_features)
    key_features = staticmethod(functions.exponential_features)


@_register("hedgehog")
class HedgehogFeatures(FeatureMap):
    """`ops.feature_maps.hedgehog_features`: softmax([Wx, −Wx]), `W` learned.

    Every head has one matrix for queries and one for keys, initialised to the identity.
    """

    def feature_dim(self, head_dim):
        return 2 * head_dim

    def create_weights(self, layer, seed):
        return tuple(
            layer.add_weight(
                name=f"{side}_feature_kernel",
                shape=(layer.num_heads, layer.key_dim, layer.key_dim),
                initializer=identity,
            )
            for side in ("query", "key")
        )

    def query_features(self, x, query_kernel, key_kernel):
        return functions.hedgehog_features(x, query_kernel)

    def key_features(self, x, query_kernel, key_kernel):
        return functions.hedgehog_features(x, key_kernel)

    def multiplications(self, head_dim):
        return head_dim * head_dim


@_register("projected")
@dataclasses.dataclass(frozen=True)
class ProjectedFeatures(FeatureMap):
    """Maps of the linear attention of flash-linear-attention, which all heads share.

    | `kind` | map | features |
    |---|---|---|
    | `"product"` | (Wx + b) ⊙ (W'x + b'), signed | d |
    | `"hedgehog"` | softmax([2(Wx + b), −2(Wx + b)]) | 2d |
    | `"relu"` | relu(Wx) | d |
    | `"dpfp"` | z ⊙ roll(z, j) for j = 1..4, z = [relu(x), relu(−x)] | 8d |

    Queries' features are multiplied by `√(d / features)`.

    Args:
        kind: One of the above. Defaults to `"product"`.
        normalize_query, normalize_key: Whether their features are divided by their sum,
            plus 1e-4. Defaults to `False`.

    Reference:
        - [Kasai et al., 2021](https://arxiv.org/abs/2103.13076), `"relu"`
        - [Zhang et al., 2024](https://arxiv.org/abs/2402.04347), `"hedgehog"`
        - [Schlag et al., 2021](https://arxiv.org/abs/2102.11174), `"dpfp"`
    """

    kind: str = "product"
    normalize_query: bool = False
    normalize_key: bool = False

    def __post_init__(self):
        check_name("kind", self.kind, PROJECTED)
        for name in ("normalize_query", "normalize_key"):
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "positive", self.kind != "product")

    def feature_dim(self, head_dim):
        return head_dim * PROJECTED[self.kind][0]

    @property
    def weights_per_side(self):
        """Matrices and biases of one side."""
        return PROJECTED[self.kind][1:]

    def create_weights(self, layer, seed):
        matrices, biases = self.weights_per_side
        dim, weights = layer.key_dim, []
        for side in ("query", "key"):
            for names, shape, initializer in (
                (matrices, (dim, dim), identity),
                (biases, (dim,), "zeros"),
            ):
                for name in names:
                    weight = layer.add_weight(
                        name=f"{side}_projected_{name}",
                        shape=shape,
                        initializer=initializer,
                    )
                    weights.append(weight)
        return tuple(weights)

    def query_features(self, x, *weights):
        features = self._features(x, weights[: len(weights) // 2])
        scale = (x.shape[-1] / features.shape[-1]) ** 0.5
        return self._normalized(features, self.normalize_query) * scale, None

    def key_features(self, x, *weights):
        features = self._features(x, weights[len(weights) // 2 :])
        return self._normalized(features, self.normalize_key), None

    def _features(self, x, weights):
        if self.kind == "product":
            first, second, bias, other_bias = weights
            return (x @ first + bias) * (x @ second + other_bias)
        if self.kind == "hedgehog":
            kernel, bias = weights
            y = 2.0 * (x @ kernel + bias)
            y = keras.ops.concatenate([y, -y], axis=-1)
            return keras.ops.softmax(y, axis=-1)
        if self.kind == "relu":
            return keras.ops.relu(x @ weights[0])
        z = keras.ops.concatenate([keras.ops.relu(x), keras.ops.relu(-x)], axis=-1)
        rolled = [keras.ops.roll(z, j, axis=-1) * z for j in range(1, 5)]
        return keras.ops.concatenate(rolled, axis=-1)

    def _normalized(self, features, normalize):
        if not normalize:
            return features
        return features / (keras.ops.sum(features, axis=-1, keepdims=True) + 1e-4)

    def multiplications(self, head_dim):
        return len(self.weights_per_side[0]) * head_dim**2


@_register("learned")
@dataclasses.dataclass(frozen=True)
class LearnedFeatures(FeatureMap):
    """`ops.feature_maps.learned_exponential_features`: exp(Wx + b − n·x²), learned.

    Every head has a matrix `W` and coefficients `n` for queries, others for keys, and
    one bias. They are initialised to hyperbolic features, which estimate `exp(q·k)`, so
    that the map works with a window; training then adapts them.

    Args:
        num_features: Number of features, even. Defaults to `2d` for heads of size `d`.
    """

    num_features: int | None = None

    estimates_softmax = True

    def __post_init__(self):
        check_positive_int("num_features", self.num_features, optional=True)
        if (self.num_features or 0) % 2:
            raise ValueError(
                "`num_features` must be even for feature_map='learned', which makes "
                "two features of each vector. Received: "
                f"num_features={self.num_features}"
            )

    def feature_dim(self, head_dim):
        return self.num_features or 2 * head_dim

    def create_weights(self, layer, seed):
        heads, dim = layer.num_heads, layer.key_dim
        features = self.feature_dim(dim)
        # One seed for both sides, so that they start with the same rows.
        seed = random.randint(1, 10**9) if layer.seed is None else layer.seed

        def kernel(shape, dtype):
            draws = random_features.gaussian_blocks(heads * features // 2, dim, seed)
            rows = random_features.random_projection(*draws)
            rows = keras.ops.reshape(rows, (heads, features // 2, dim))
            both = keras.ops.concatenate([rows, -rows], axis=1)
            return keras.ops.cast(keras.ops.swapaxes(both, 1, 2), dtype)

        def weight(name, initializer, *shape):
            return layer.add_weight(
                name=name,
                shape=(heads, *shape),
                initializer=initializer,
            )

        half = keras.initializers.Constant(0.5)
        return (
            weight("query_feature_kernel", kernel, dim, features),
            weight("key_feature_kernel", kernel, dim, features),
            weight("query_feature_norm", half, dim),
            weight("key_feature_norm", half, dim),
            weight("feature_bias", "zeros", features),
        )

    def query_features(self, x, *weights):
        query_kernel, _, query_norm, _, bias = weights
        none = keras.ops.zeros_like(bias)
        return functions.learned_exponential_features(x, query_kernel, none, query_norm)

    def key_features(self, x, *weights):
        _, key_kernel, _, key_norm, bias = weights
        return functions.learned_exponential_features(x, key_kernel, bias, key_norm)

    def multiplications(self, head_dim):
        return head_dim * self.feature_dim(head_dim)


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
@dataclasses.dataclass(frozen=True)
class FunctionFeatures(FeatureMap):
    """A function without weights as a feature map.

    Args:
        function: Maps `(..., head_dim)` to non-negative features
            `(..., num_features)`; for saving, a registered custom object of Keras.
        num_features: Number of features. Defaults to `head_dim`.
    """

    function: object
    num_features: int | None = None

    def __post_init__(self):
        check_positive_int("num_features", self.num_features, optional=True)

    @property
    def name(self):
        return getattr(self.function, "__name__", repr(self.function))

    def feature_dim(self, head_dim):
        return self.num_features or head_dim

    def query_features(self, x):
        features = self.function(x)
        size = self.feature_dim(x.shape[-1])
        if features.shape[-1] != size:
            raise ValueError(
                f"`feature_map` must give `num_features={size}` features (by default, "
                f"`key_dim`). Received: features of shape {tuple(features.shape)}"
            )
        return features, None

    def get_config(self):
        function = keras.saving.serialize_keras_object(self.function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config):
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(**{**config, "function": function})


@dataclasses.dataclass(frozen=True)
class CalibratedFeatures(FeatureMap):
    """A map that `can_calibrate`, of queries around their mean, in few coordinates.

    With queries `q` of mean `μ`, `exp(q·k) = exp((q − μ)·k) exp(μ·k)`: features
    estimate the first factor only; the second is a log weight of the key. Coordinates
    that the features do not see contribute their mean over Gaussian queries of variance
    `v`, `E exp(q·k) = exp(v k² / 2)`, also as a log weight.

    The functions read the weights of a `KernelCalibration` before those of the map:
    `μ` and `v`, each `(heads, 1, 1, head_dim)`, with `v = 0` for coordinates that are
    seen.

    Args:
        features: The map.
        rank: Number of coordinates that a polynomial map sees. Defaults to `None`:
            all of them.
    """

    features: FeatureMap
    rank: int | None = None

    estimates_softmax = True

    def __post_init__(self):
        if not self.features.can_calibrate:
            raise ValueError(
                "`calibrated=True` needs one of the feature maps "
                f"{', '.join(names('can_calibrate'))}. Received: "
                f"feature_map={self.features.name!r}"
            )
        check_positive_int("rank", self.rank, optional=True)

    name = property(lambda self: self.features.name)
    random = property(lambda self: self.features.random)

    def feature_dim(self, head_dim):
        if self.rank is not None and (self.random or self.rank > head_dim):
            raise ValueError(
                "`rank` must be at most `key_dim`, and needs a polynomial feature map, "
                f"such as 'taylor'. Received: rank={self.rank}, key_dim={head_dim}, "
                f"feature_map={self.name!r}"
            )
        return self.features.feature_dim(self.rank or head_dim)

    def create_weights(self, layer, seed):
        return self.features.create_weights(layer, seed)

    def query_features(self, x, center, unseen_variance, *weights):
        return self._features(x - center, *weights)

    def key_features(self, x, center, unseen_variance, *weights):
        mapped, log_scale = self._features(x, *weights)
        log_weight = ops.sum(x * (center + 0.5 * unseen_variance * x), axis=-1)
        return mapped, log_scale + log_weight

    def _features(self, x, *weights):
        return self.features.calibrated_features(x, self.rank or x.shape[-1], *weights)

    def draw(self, head_dim, seed):
        return self.features.draw(head_dim, seed)

    def project(self, draws, dtype):
        return self.features.project(draws, dtype)

    def multiplications(self, head_dim):
        # Computing the coordinates multiplies by a matrix.
        return head_dim**2 + self.features.multiplications(head_dim)
