"""PerformerAttention: linear attention with random features, optionally calibrated."""

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.arguments import add_counter
from keras_efficient_attn.layers.attention import feature_maps
from keras_efficient_attn.layers.attention.calibration import paired_batches
from keras_efficient_attn.layers.attention.linear.calibration import (
    FarMoments,
    KernelCalibration,
)
from keras_efficient_attn.layers.attention.linear.layer import LinearAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.layers.replicas import take_first_replica
from keras_efficient_attn.ops.common.checks import check_bool, check_positive_int
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, conditional
from keras_efficient_attn.ops.reversible.remembered import is_replay


@register_attention("performer")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class PerformerAttention(LinearAttention):
    """`LinearAttention` with random features that estimate softmax attention.

    With positive random features (FAVOR+) of queries and keys, `φ(q)·φ(k)` is an
    unbiased estimate of softmax's weight `exp(q·k)`:

    ```
    φ(x)[i] = exp(ω[i]·x − ‖x‖²/2) / √m,   ω[i] ~ N(0, I)
    head[t] = φ(q[t]) (Σ_s φ(k[s])ᵀ v[s]) / φ(q[t])·(Σ_s φ(k[s]))
    ```

    with `q` and `k` scaled by `key_dim^(-1/4)`. The estimate's error grows with
    `exp(‖q + k‖²)`: a model trained with softmax needs `window`; a model trained from
    scratch is more stable with `qk_norm`.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the concatenated
            heads), `use_bias`, ….
        feature_map: As for `LinearAttention`. Defaults to `"favor+"`.
        num_features: Features per head, for the random maps, `"relu"` and functions;
            even for `"hyperbolic"` and `"trigonometric"`. Defaults to
            `max(256, key_dim · ln(key_dim))` for the random maps, to no projection
            for `"relu"`, and to `key_dim` for functions.
        order: Even order of `"taylor"` and `"power"`, which makes
            C(key_dim + order, order) features. Defaults to 2.
        orthogonal: Whether random rows are orthogonal in blocks of `key_dim`.
            Defaults to `True`.
        row_norm: `"chi"` (unbiased, the default) or `"sqrt_dim"`.
        redraw_interval: Training calls between redraws of the projection. A weight
            counts the calls; the count is frozen at inference and when the layer is not
            trainable. A rerun by gradient checkpointing does not count. Defaults to
            `None`: never.
        calibrated: Whether the features estimate the kernel centred at the means of
            queries and keys, in coordinates (and, for random features, with a shape)
            that `calibrate` fits to data, so that the layer can replace trained softmax
            attention. Before `calibrate()` the layer behaves as with
            `calibrated=False`, except that `rank` already drops coordinates. For
            `"favor+"`, `"hyperbolic"`, `"taylor"` and `"power"`. Defaults to `False`.
        rank: Number of coordinates that a calibrated polynomial map sees: those with
            the largest contribution to `q·k`. The others affect the weights of keys
            only. A rank of 21 makes 253 features of order 2. Defaults to `None`: all of
            `key_dim`.
        **kwargs: Further arguments of `LinearAttention`: `window`, `normalize`,
            `qk_norm`, `temperature`, `rotary_wavelength`, `chunk_size`; and of
            `keras.layers.MultiHeadAttention`. `seed` also seeds the projection.

    Call arguments:
        As `LinearAttention`.

    Returns:
        As `LinearAttention`.

    Raises:
        ValueError: If an argument is invalid, or given for a map that does not use it;
            if a polynomial map would have too many features to help; on a call with
            `use_causal_mask` for `"favor++"`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import PerformerAttention
    >>> layer = PerformerAttention(num_heads=4, key_dim=32, redraw_interval=1000)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> output = layer(x, x, use_causal_mask=True, training=True)

    Replacing trained softmax attention, without training:

    >>> layer = PerformerAttention(
    ...     num_heads=4, key_dim=32, feature_map="power", rank=21, window=32,
    ...     calibrated=True)
    >>> layer.build(x.shape, x.shape)  # Then `layer.set_weights(...)`.
    >>> spread = layer.calibrate(x)

    Reference:
        - [Choromanski et al., 2021](https://arxiv.org/abs/2009.14794)
    """

    def __init__(
        self,
        *args,
        feature_map="favor+",
        num_features: int | None = None,
        order: int | None = None,
        orthogonal: bool = True,
        row_norm: str = "chi",
        redraw_interval: int | None = None,
        calibrated: bool = False,
        rank: int | None = None,
        **kwargs,
    ):
        check_bool("calibrated", calibrated)
        options = _given_options(num_features, order, orthogonal, row_norm)
        used_map = feature_maps.get(feature_map, **options)
        if calibrated:
            used_map = feature_maps.CalibratedFeatures(used_map, rank)
        elif rank is not None:
            raise ValueError(
                "`rank` needs a polynomial feature map and `calibrated=True`. "
                f"Received: rank={rank}, calibrated={calibrated!r}"
            )
        super().__init__(*args, feature_map=used_map, **kwargs)
        self._feature_map_identifier = feature_map
        self.keep(locals(), omit=("feature_map", "options", "used_map"))
        check_positive_int("redraw_interval", redraw_interval, optional=True)
        if redraw_interval is not None and not used_map.random:
            raise ValueError(
                f"feature_map={used_map.name!r} has no random projection to redraw: "
                "leave out `redraw_interval`. Received: "
                f"redraw_interval={redraw_interval}"
            )
        if calibrated and not self.normalize:
            raise ValueError(
                "`calibrated=True` needs `normalize=True`: calibrated features omit "
                "factors that only the normalisation cancels. Received: "
                f"normalize={self.normalize!r}"
            )

    can_calibrate = calibrates_beyond_window = property(lambda self: self.calibrated)

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        self._calibration = None
        if self.calibrated:
            self._calibration = KernelCalibration(
                self._num_heads,
                self._key_dim,
                self.feature_map.random,
                dtype=self.dtype_policy,
                name="calibration",
            )
            self._calibration.build()
        if self.redraw_interval is not None:
            self._calls_since_redraw = add_counter(self, "calls_since_redraw")

    def redraw(self):
        """Draws a new projection.

        Raises:
            ValueError: If the feature map has no projection, or the layer is not built.
        """
        if not self.built or not self.feature_map.random:
            raise ValueError(
                "`redraw()` needs a built layer with a random feature map. Received: "
                f"feature_map={self.feature_map.name!r}, built={self.built}"
            )
        draws = self.feature_map.draw(self._key_dim, self._projection_seed)
        self._projection.assign(self.feature_map.project(draws, self._projection.dtype))

    def calibrate(self, data, query=None, use_causal_mask=False):
        """Fits the features to the queries and keys that this layer computes from data.

        The fit has a closed form. It uses the means and covariances of the queries and
        keys of each head, weighted by softmax attention to keys beyond the window, if
        any. The features then estimate the centred kernel, `exp((q − mean q)·(k − mean
        k))`; the remaining factor of `exp(q·k)` is computed exactly per key. Queries
        and keys are mapped to coordinates in which they have the same diagonal
        covariance. Random features use only the coordinates where their sampling error
        is smaller than the error of dropping the coordinate, and are drawn from wider
        Gaussians where queries and keys vary more; polynomial ones use the first
        `rank`.

        Args:
            data: The `key` (or `value`) of calls of the layer: an array
                `(batch, length, dim)`, or an iterable of batches, each an array or,
                with padding, a pair of an array and a boolean `(batch, length)`, `True`
                for positions to use. A few thousand positions are enough.
            query: The `query` of these calls, in the same form, batch by batch.
                Defaults to `data`: self-attention.
            use_causal_mask: Whether the layer will be called with a causal mask.
                Defaults to `False`.

        Returns:
            The root mean square of the centred `q·k` per head, as a NumPy array.
            Features work well below 1 and badly far above 1.

        Raises:
            ValueError: If the layer is not built, or not `calibrated`; if a batch has
                the wrong type, or `query` and `data` have different numbers of
                batches; or if no query sees a key, beyond the window if there is one.

        Reference:
            - [Likhosherstov et al., 2023](https://arxiv.org/abs/2302.00787)
        """
        if not self.built or not self.calibrated:
            raise ValueError(
                "`calibrate()` needs a built layer with `calibrated=True`. Received: "
                f"calibrated={self.calibrated!r}, built={self.built}"
            )
        moments = FarMoments(self.window, use_causal_mask)
        for (queries, query_mask), (keys, key_mask) in paired_batches(query, data):
            query = self._query_dense(ops.convert_to_tensor(queries))
            key = self._key_dense(ops.convert_to_tensor(keys))
            query = self._prepare(query, accumulator_dtype(query), None)
            key = self._prepare(self._for_query_heads(key), query.dtype, None)
            query, key = ops.convert_to_numpy(query), ops.convert_to_numpy(key)
            moments.add(query, key, query_mask, key_mask)
        if not np.all(moments.key.weight):
            raise ValueError(
                "No query in `data` sees a key beyond the window: pass longer "
                "sequences, or make the window smaller. Received: "
                f"window={self.window}"
            )
        rank = None if self.feature_map.random else self.rank or self._key_dim
        return self._calibration.assign(moments, self.feature_dim, rank)

    def _map_inputs(self, query, key, call):
        if call.training and self._learns and not is_replay():
            self._redraw_if_due()
        if not self.calibrated:
            return super()._map_inputs(query, key, call)
        query, key = self._calibration.coordinates(query, key)
        query, key, weights = super()._map_inputs(query, key, call)
        return query, key, self._calibration.map_weights(query) + weights

    @property
    def _learns(self):
        return self.redraw_interval is not None and self.trainable

    @property
    def _projection(self):
        return self._map_variables[0]

    def _redraw_if_due(self):
        calls = ops.convert_to_tensor(self._calls_since_redraw)
        due = calls >= self.redraw_interval
        # Draw outside of the condition, where the seed generator can advance.
        draws = self.feature_map.draw(self._key_dim, self._projection_seed)
        # Replicas may have different seeds.
        draws = tuple(map(take_first_replica, draws))
        current = ops.convert_to_tensor(self._projection)
        projection = conditional(
            due, lambda: self.feature_map.project(draws, current.dtype), current
        )
        self._projection.assign(projection)
        self._calls_since_redraw.assign(ops.where(due, 1, calls + 1))


def _given_options(num_features, order, orthogonal, row_norm):
    """The arguments that were given: maps without a projection refuse them."""
    options = {"num_features": num_features, "order": order}
    options = {name: value for name, value in options.items() if value is not None}
    if orthogonal is not True:
        options["orthogonal"] = orthogonal
    if row_norm != "chi":
        options["row_norm"] = row_norm
    return options
