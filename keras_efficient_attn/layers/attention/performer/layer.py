"""PerformerAttention: linear attention through a feature map."""

import functools

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.attention.base import AttentionCall, EfficientAttention
from keras_efficient_attn.layers.attention.calibration import paired_batches
from keras_efficient_attn.layers.attention.performer.arguments import (
    CALIBRATED_RANDOM_MAPS,
    EXPONENTIAL_MAPS,
    POLYNOMIAL_MAPS,
    RANDOM_MAPS,
    TWO_SIDED_MAPS,
    check_arguments,
)
from keras_efficient_attn.layers.attention.performer.calibration import (
    FarMoments,
    KernelCalibration,
)
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common import random_features
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    rms_normalize,
    wide_dtype,
)
from keras_efficient_attn.ops.common.pairs import count_pairs
from keras_efficient_attn.ops.linear_attention import calibrated_features, feature_maps
from keras_efficient_attn.ops.linear_attention.api import (
    CHUNK_SIZE,
    linear_attention_state_spec,
    mapped_linear_attention,
)
from keras_efficient_attn.ops.linear_attention.windowed import (
    windowed_linear_attention,
    windowed_linear_attention_at,
)


@register_attention("performer")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class PerformerAttention(EfficientAttention):
    """Linear attention through a feature map, a drop-in for `MultiHeadAttention`.

    Softmax attention weighs key `s` for query `t` by `exp(q·k)`. Here the weight is
    `φ(q)·φ(k)`, so that the keys can be summed up before the queries come:

    ```
    head[t] = φ(q[t]) (Σ_s φ(k[s])ᵀ v[s]) / φ(q[t])·(Σ_s φ(k[s]))
    ```

    Time and memory grow linearly with the length, and a causal layer needs a state of
    constant size only. For the maps that estimate the exponential, `q` and `k` are
    scaled by `key_dim^(-1/4)`, so that the weight estimates that of softmax
    attention. The estimate's error grows with `exp(‖q + k‖²)`: a model trained with
    softmax needs `window`, and one trained from scratch is steadier with `qk_norm`.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the concatenated
            heads), `use_bias`, ….
        feature_map: Name of the map, or a callable. Defaults to `"favor+"`.

            | name | map | features |
            |---|---|---|
            | `"favor+"` | positive random features | `num_features` |
            | `"hyperbolic"` | both signs of each random row | `num_features`, even |
            | `"favor++"` | optimal positive features, not causal | `num_features` |
            | `"trigonometric"` | sines and cosines, signed | `num_features`, even |
            | `"taylor"` | Taylor expansion of the given `order` | C(d + order, order) |
            | `"power"` | (1 + q·k/order)^order | C(d + order, order) |
            | `"relu"` | relu(x) + 1e-3, of a projection with `num_features` | d |
            | `"elu"` | elu(x) + 1 | d |
            | `"softmax"` | softmax of queries, exponential of keys | d |

            A callable maps `(..., key_dim)` to non-negative
            features `(..., num_features)`; it has no weights (put a learned map in
            layers before this one), and is registered for serialization, as any
            custom object of Keras.
        num_features: Features per head, for random maps and `"relu"`. Defaults to
            `max(256, key_dim · ln(key_dim))` for the random maps, to no projection
            for `"relu"`, and to what the callable makes of `key_dim`.
        order: Even order of `"taylor"` and `"power"`. Defaults to 2.
        orthogonal: Whether random rows are orthogonal in blocks of `key_dim`.
            Defaults to `True`.
        row_norm: `"chi"` (unbiased, the default) or `"sqrt_dim"`.
        redraw_interval: Training calls between new draws of the projection; `None`
            (the default) never redraws. Counted in a weight, frozen at inference and
            when the layer is not trainable.
        window: Number of nearest keys to attend to exactly, with the features for
            the others under one denominator: a query sees itself and `window - 1`
            earlier keys exactly and, if not causal, as many later ones. For maps that
            estimate the exponential, and lengths that agree. Defaults to `None`.
        normalize: Whether to divide by the sum of the weights. Defaults to `True`.
        qk_norm: Whether queries and keys are RMS-normalised (without gain) before
            scaling. Defaults to `False`.
        temperature: Positive float; `q·k` is divided by it. Defaults to 1.
        rotary_wavelength: Longest wavelength of rotary positions, applied to
            queries and keys before the map, such as 10,000. Defaults to `None`: no
            positions.
        calibrated: Whether the features estimate the kernel about the means of
            queries and keys, in coordinates, and for random features with a shape,
            that `calibrate` fits to data, so that the layer can take the place of
            trained softmax attention. Until `calibrate`, the layer is the one
            without, but for what a `rank` leaves out. For `"favor+"`,
            `"hyperbolic"`, `"taylor"` and `"power"`. Defaults to `False`.
        rank: Of a calibrated polynomial map, the number of coordinates that it sees,
            those with the largest part in `q·k`; d in the table above. The others
            have a part in the weights of keys only. 21 makes 253 features of order
            2. Defaults to `None`: all of `key_dim`.
        chunk_size: Positions a chunk; speed only. Defaults to 64.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`. `seed` also
            seeds the projection.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`.

    Raises:
        ValueError: If an argument is invalid, or given for a map that has no use for
            it; if a polynomial map would have more features than can help; on a call
            with `use_causal_mask` for `"favor++"`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import PerformerAttention
    >>> layer = PerformerAttention(num_heads=4, key_dim=32)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer(x, x, use_causal_mask=True).shape
    (2, 1000, 64)

    Streaming, a token at a time, in constant memory:

    >>> state = layer.get_initial_state(batch_size=2)
    >>> y, state = layer(x[:, :1], x[:, :1], use_causal_mask=True, state=state)

    In the place of trained softmax attention, without training:

    >>> layer = PerformerAttention(
    ...     num_heads=4, key_dim=32, feature_map="power", rank=21, window=32,
    ...     calibrated=True)
    >>> layer.build(x.shape, x.shape)  # Then `layer.set_weights(...)`.
    >>> spread = layer.calibrate(x)

    Reference:
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
        - [Katharopoulos et al., 2020](https://arxiv.org/abs/2006.16236)
    """

    def __init__(
        self,
        *args,
        feature_map="favor+",
        num_features=None,
        order=None,
        orthogonal=True,
        row_norm="chi",
        redraw_interval=None,
        window=None,
        normalize=True,
        qk_norm=False,
        temperature=1.0,
        rotary_wavelength=None,
        calibrated=False,
        rank=None,
        chunk_size=CHUNK_SIZE,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.feature_map = feature_map
        self.num_features = num_features
        self.order = order
        self.orthogonal = orthogonal
        self.row_norm = row_norm
        self.redraw_interval = redraw_interval
        self.window = window
        self.normalize = normalize
        self.qk_norm = qk_norm
        self.temperature = temperature
        self.rotary_wavelength = rotary_wavelength
        self.calibrated = calibrated
        self.rank = rank
        self.chunk_size = chunk_size
        check_arguments(self, self._key_dim)
        self._query_map, self._key_map, self._feature_dim = self._resolve_maps()

    @property
    def feature_dim(self):
        """Number of features per head."""
        return self._feature_dim

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        self._projection = self._calibration = None
        if self.calibrated:
            self._calibration = KernelCalibration(
                self._num_heads,
                self._key_dim,
                self.feature_map in CALIBRATED_RANDOM_MAPS,
                dtype=self.dtype_policy,
                name="calibration",
            )
            self._calibration.build()
        if not self._projection_rows:
            return
        self._projection_seed = keras.random.SeedGenerator(self.seed)
        # Neither is cast to the compute dtype: assignments have to reach them.
        self._projection = self.add_weight(
            name="projection",
            shape=(self._projection_rows, self._key_dim),
            initializer=lambda shape, dtype: ops.cast(
                self._project_draws(*self._draw()), dtype
            ),
            # Rounded rows would not be orthogonal.
            dtype=wide_dtype(self.variable_dtype),
            trainable=False,
            autocast=False,
        )
        if self.redraw_interval is not None:
            self._calls_since_redraw = self.add_weight(
                name="calls_since_redraw",
                shape=(),
                dtype="int32",
                initializer="zeros",
                trainable=False,
                autocast=False,
            )

    def redraw(self):
        """Draws a new projection.

        Raises:
            ValueError: If the feature map has none, or the layer is not built.
        """
        if not self.built or self._projection is None:
            raise ValueError(
                "`redraw()` needs a built layer with a random feature map. Received: "
                f"feature_map={self.feature_map!r}, built={self.built}"
            )
        self._projection.assign(self._project_draws(*self._draw()))

    def calibrate(self, data, query=None, use_causal_mask=False):
        """Fits the features to the queries and keys that this layer makes of data.

        In closed form, from the means and covariances of the queries and keys of each
        head, weighted by how much softmax attends from the one to the other where no
        window does so exactly. The features then estimate the kernel about the means,
        `exp((q − mean q)·(k − mean k))`; what that leaves of `exp(q·k)` is known for
        each key and counts exactly. Queries and keys are brought to coordinates in
        which they have one, diagonal covariance. Random features see the coordinates
        in which they are less noise than the lack of them would be, and are drawn from
        wider Gaussians where queries and keys vary more; polynomial ones see the first
        `rank`.

        Args:
            data: What the layer gets as `key` (or `value`): an array
                `(batch, length, dim)`, or an iterable of batches, each such an array
                or, with padding, a pair of it and a boolean `(batch, length)`, `True`
                for positions to use. Some thousand positions are enough.
            query: What it gets as `query`, in the same form, batch by batch. Defaults
                to `data`: self-attention.
            use_causal_mask: Whether the layer is to be called so. Defaults to `False`.

        Returns:
            The root mean square of `q·k` about the means, of each head, as a NumPy
            array: features do well below 1, and badly far above.

        Raises:
            ValueError: If the layer is not built, or not `calibrated`; if a batch is
                none, or the two are not as many; or if no query sees a key, beyond
                the window if there is one.

        Reference:
            - [Likhosherstov et al., 2023](https://arxiv.org/abs/2302.00787)
        """
        if not self.built or not self.calibrated:
            raise ValueError(
                "`calibrate()` needs a built layer with `calibrated=True`. Received: "
                f"calibrated={self.calibrated!r}, built={self.built}"
            )
        moments = FarMoments(self.window, use_causal_mask)
        for queries, keys in paired_batches(query, data):
            (of_queries, query_mask), (of_keys, key_mask) = queries, keys
            query = self._projected_query(ops.convert_to_tensor(of_queries))
            key = self._projected_key(ops.convert_to_tensor(of_keys))
            query = self._prepared(query, accumulator_dtype(query), None)
            key = self._prepared(self._for_query_heads(key), query.dtype, None)
            query, key = ops.convert_to_numpy(query), ops.convert_to_numpy(key)
            moments.add(query, key, query_mask, key_mask)
        if not np.all(moments.key.weight):
            raise ValueError(
                "`data` must hold a query that sees a key beyond the window. Received: "
                f"none, with window={self.window}"
            )
        rank = None
        if self.feature_map in POLYNOMIAL_MAPS:
            rank = self.rank or self._key_dim
        return self._calibration.assign(moments, self._feature_dim, rank)

    @property
    def can_calibrate(self):
        return self.calibrated

    @property
    def calibrates_beyond_window(self):
        return self.calibrated

    @property
    def estimates_softmax(self):
        return (
            self.feature_map in EXPONENTIAL_MAPS
            and self.normalize
            and not self.qk_norm
            and self.temperature == 1.0
            and self.rotary_wavelength is None
            and not self._use_gate
        )

    def operations(self, length, causal):
        if self._use_gate:
            return None
        heads, dim, value_dim = self._num_heads, self._key_dim, self._value_dim
        features = 4 * heads * dim * self._projection_rows
        sums = 4 * heads * value_dim * self._feature_dim
        window = min(self.window or 0, length)
        per_pair = 2 * heads * (dim + value_dim)
        pairs = count_pairs(window, length, causal)
        return (features + sums) * length + per_pair * pairs

    def state_spec(self, batch_size, max_length):
        heads, dtype = self._num_heads, self.state_dtype
        sizes = (batch_size, heads, self._feature_dim, self._value_dim)
        spec = linear_attention_state_spec(*sizes, dtype)
        if self.window is not None:
            rows = (batch_size, self.window)
            spec["window_key"] = ((*rows, heads, self._key_dim), dtype)
            spec["window_value"] = ((*rows, heads, self._value_dim), dtype)
            spec["window_mask"] = (rows, dtype)
        if self.rotary_wavelength is not None:
            spec["position"] = ((batch_size,), "int32")
        return spec

    def attend(self, query, key, value, call):
        state, key_mask = call.state, call.key_mask
        dtype = accumulator_dtype(query, key, value)
        position = None
        if self.rotary_wavelength is not None and state is not None:
            state = dict(state)
            position = state.pop("position")
        query = self._prepared(query, dtype, position)
        key = self._prepared(key, dtype, position)
        if self.calibrated:
            query, key = self._calibration.coordinates(query, key)
        arguments = dict(
            query_map=self._query_map,
            key_map=self._key_map,
            num_features=self._feature_dim,
            map_weights=self._map_weights(query, key, call),
            key_mask=key_mask,
            causal=call.causal,
            state=state,
            chunk_size=self.chunk_size,
        )
        if self.window is None:
            output = "normalized" if self.normalize else "sum"
            (heads,), state = mapped_linear_attention(
                query, key, value, output=output, **arguments
            )
        else:
            heads, state = windowed_linear_attention(
                query,
                key,
                value,
                window=self.window,
                normalize=self.normalize,
                **arguments,
            )
        if position is not None:
            state["position"] = position + ops.shape(query)[1]
        if self._dropout > 0.0:
            heads = self._dropout_layer(heads, training=call.training)
        return heads, state

    def attend_at(self, position, query, key, value, key_mask):
        if query.shape[1] != 1:
            return super().attend_at(position, query, key, value, key_mask)
        dtype = accumulator_dtype(query, key, value)
        start = ops.reshape(ops.cast(position, "int32"), (1,))
        query = self._prepared(query, dtype, start)
        key = self._prepared(key, dtype, None)
        if self.calibrated:
            query, key = self._calibration.coordinates(query, key)
        return windowed_linear_attention_at(
            position,
            query,
            key,
            value,
            window=self.window,
            query_map=self._query_map,
            key_map=self._key_map,
            num_features=self._feature_dim,
            map_weights=self._map_weights(query, key, AttentionCall(key_mask=key_mask)),
            key_mask=key_mask,
            chunk_size=self.chunk_size,
            normalize=self.normalize,
        )

    def get_config(self):
        feature_map = self.feature_map
        if not isinstance(feature_map, str):
            feature_map = keras.saving.serialize_keras_object(feature_map)
        return {
            **super().get_config(),
            "feature_map": feature_map,
            "num_features": self.num_features,
            "order": self.order,
            "orthogonal": self.orthogonal,
            "row_norm": self.row_norm,
            "redraw_interval": self.redraw_interval,
            "window": self.window,
            "normalize": self.normalize,
            "qk_norm": self.qk_norm,
            "temperature": self.temperature,
            "rotary_wavelength": self.rotary_wavelength,
            "calibrated": self.calibrated,
            "rank": self.rank,
            "chunk_size": self.chunk_size,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if not isinstance(config.get("feature_map", ""), str):
            config["feature_map"] = keras.saving.deserialize_keras_object(
                config["feature_map"]
            )
        return super().from_config(config)

    @property
    def _input_scale(self):
        scale = self.temperature**-0.5
        if self.feature_map in EXPONENTIAL_MAPS:
            scale *= self._key_dim**-0.25
        return scale

    @property
    def _projection_rows(self):
        """Rows of the projection, 0 for maps without one."""
        if self.feature_map == "relu":
            return self.num_features or 0
        if self.feature_map not in RANDOM_MAPS:
            return 0
        features = self.num_features or random_features.default_num_features(
            self._key_dim
        )
        return features // 2 if self.feature_map in TWO_SIDED_MAPS else features

    def _resolve_maps(self):
        """The query map, the key map and the number of their features."""
        name, rows = self.feature_map, self._projection_rows
        if callable(name):
            size = self.num_features or self._key_dim
        elif name in POLYNOMIAL_MAPS:
            dim = self.rank or self._key_dim
            size = feature_maps.polynomial_dimension(dim, self.order or 2)
        elif name in TWO_SIDED_MAPS:
            size = 2 * rows
        else:
            size = rows or self._key_dim
        order = self.order or 2
        if self.calibrated:
            return *_calibrated_maps(name, order, self.rank or self._key_dim), size
        return *_query_and_key_map(name, order, size), size

    def _map_weights(self, query, key, call):
        """What the feature maps read beside their input."""
        weights = ()
        if self._projection is not None:
            projection = self._current_projection(call.training)
            weights += (ops.cast(projection, query.dtype),)
        if self.calibrated:
            return self._calibration.map_weights(query) + weights
        if self.feature_map == "favor++":
            masks = call.query_mask, call.key_mask
            shape = feature_maps.optimal_shape(query, key, *masks)
            weights += (shape[..., None, None, None],)
        return weights

    def _current_projection(self, training):
        if self.redraw_interval is None or not (training and self.trainable):
            return ops.convert_to_tensor(self._projection)
        calls = ops.convert_to_tensor(self._calls_since_redraw)
        due = calls >= self.redraw_interval
        draws = self._draw()
        current = ops.convert_to_tensor(self._projection)
        projection = ops.cond(
            due,
            lambda: ops.cast(self._project_draws(*draws), current.dtype),
            lambda: current,
        )
        self._projection.assign(projection)
        self._calls_since_redraw.assign(ops.where(due, 1, calls + 1))
        return projection

    def _draw(self):
        return random_features.gaussian_blocks(
            self._projection_rows, self._key_dim, self._projection_seed
        )

    def _project_draws(self, directions, norms):
        return random_features.random_projection(
            directions, norms, self.orthogonal, self.row_norm
        )

    def _prepared(self, x, dtype, position):
        """Queries or keys, normalised, rotated and scaled."""
        x = ops.cast(x, dtype)
        if self.qk_norm:
            x = rms_normalize(x)
        return self._rotated(x, position) * self._input_scale

    def _check_call(self, query, value, key, call):
        super()._check_call(query, value, key, call)
        if call.causal and self.feature_map == "favor++":
            raise ValueError(
                "feature_map='favor++' reads the whole sequence and has no causal "
                "form; use 'favor+' or 'hyperbolic'. Received: use_causal_mask=True"
            )
        lengths = query.shape[1], key.shape[1]
        if self.window is not None and None not in lengths and len(set(lengths)) > 1:
            raise ValueError(
                "`window` needs queries and keys at the same positions. Received: "
                f"query length {lengths[0]}, key length {lengths[1]}"
            )


@functools.cache
def _query_and_key_map(name, order, size):
    """One pair of functions per map: JAX compiles once per function object."""
    if name == "softmax":
        maps = feature_maps
        return maps.softmax_query_features, maps.exponential_key_features
    if callable(name):
        both = functools.partial(_custom_features, name, size)
    else:
        both = {
            "favor+": feature_maps.positive_random_features,
            "hyperbolic": functools.partial(
                feature_maps.positive_random_features, hyperbolic=True
            ),
            "favor++": feature_maps.optimal_positive_features,
            "trigonometric": feature_maps.trigonometric_features,
            "taylor": functools.partial(feature_maps.taylor_features, order=order),
            "power": functools.partial(feature_maps.power_features, order=order),
            "relu": feature_maps.relu_features,
            "elu": feature_maps.elu_features,
        }[name]
    return both, both


@functools.cache
def _calibrated_maps(name, order, rank):
    """As `_query_and_key_map`, of a calibrated layer."""
    maps = calibrated_features
    if name in POLYNOMIAL_MAPS:
        features, _ = _query_and_key_map(name, order, None)
        features = functools.partial(
            maps.seen_polynomial_features, features=features, rank=rank
        )
    else:
        features = functools.partial(
            maps.seen_random_features, hyperbolic=name == "hyperbolic"
        )
    return (
        functools.partial(maps.query_features, features),
        functools.partial(maps.key_features, features),
    )


def _custom_features(function, size, x):
    """A user's map, with the log scale that the functions of this package return."""
    features = function(x)
    if features.shape[-1] != size:
        raise ValueError(
            f"`feature_map` must give `num_features={size}` features (by default, "
            f"`key_dim`). Received: features of shape {tuple(features.shape)}"
        )
    return features, None
