"""LinearAttention: attention through a feature map, in linear time."""

import functools

import keras
from keras import ops

from keras_efficient_attn.distribution import linear as split_linear
from keras_efficient_attn.distribution.sequence_parallel import check_split_is_causal
from keras_efficient_attn.layers.attention import feature_maps
from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.feature_maps import FeatureMap
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    check_positive_number,
    check_rotary_wavelength,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.feature_kernels.choice import (
    LinearAttentionConfig,
)
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
)
from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention_state_spec,
    linear_attention_with_feature_maps,
)
from keras_efficient_attn.ops.linear_attention.windowed import (
    windowed_linear_attention,
)


@register_attention("linear")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class LinearAttention(EfficientAttention):
    """Attention whose weights are dot products of features, in linear time.

    Softmax attention weighs key `s` for query `t` by `exp(q·k)`. Here the weight is
    `φ(q)·φ(k)`, so that keys and values can be summed before the queries are known:

    ```
    head[t] = φ(q[t]) (Σ_s φ(k[s])ᵀ v[s]) / φ(q[t])·(Σ_s φ(k[s]))
    ```

    Time and memory grow linearly with the length, and a causal layer needs a state of
    constant size only. For maps that estimate the exponential, `q` and `k` are scaled
    by `key_dim^(-1/4)`, so that the weight estimates softmax attention's.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the concatenated
            heads), `use_bias`, ….
        feature_map: Name of the map, a `FeatureMap`, or a function without weights.
            Defaults to `"elu"`.

            | name | map | features |
            |---|---|---|
            | `"elu"` | elu(x) + 1 | d |
            | `"exp"` | exp(x) | d |
            | `"identity"` | x, signed | d |
            | `"unit"` | x / ‖x‖, signed | d |
            | `"sum"` | x by its sum of absolutes, signed | d |
            | `"softmax"` | softmax of queries, exponential of keys | d |
            | `"hedgehog"` | softmax([Wx, −Wx]), learned per head | 2d |
            | `"projected"` | products and others, learned for all heads | d to 8d |
            | `"learned"` | exp(Wx + b − n·x²), learned per head | 2d |
            | `"relu"` | relu(x) + 1e-3 | d |
            | `"taylor"` | Taylor expansion of the exponential, order 2 | C(d + 2, 2) |
            | `"power"` | (1 + q·k/2)² | C(d + 2, 2) |
            | `"favor+"` | positive random features | max(256, d · ln(d)) |
            | `"hyperbolic"` | both signs of each random row | max(256, d · ln(d)) |
            | `"favor++"` | optimal positive features, not causal | max(256, …) |
            | `"trigonometric"` | sines and cosines, signed | max(256, …) |

            A map with other arguments is given as an object, such as
            `feature_maps.get("taylor", order=4)`. A function maps `(..., key_dim)` to
            as many non-negative features; register it with Keras for serialization,
            like any custom object. A map with weights is a subclass of `FeatureMap`.
        window: Number of nearest keys to attend to exactly; features estimate the
            others, under one denominator. A query sees itself and `window - 1` earlier
            keys exactly and, if not causal, as many later ones. Needs a map that
            estimates the exponential, and equal lengths. Defaults to `None`;
            `sliding_window` of `keras.layers.MultiHeadAttention` means the same.
        normalize: Whether to divide by the sum of the weights. Defaults to `True`.
        qk_norm: Whether queries and keys are RMS-normalised (without gain) before
            scaling. Defaults to `False`.
        temperature: Positive float; `q·k` is divided by it. Defaults to 1.
        rotary_wavelength: Longest wavelength of rotary positions, applied to
            queries and keys before the map, such as 10,000. Defaults to `None`: no
            positions.
        chunk_size: Positions per chunk; affects speed only. Defaults to `None`: a value
            that suits the device, 64 on a CPU.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`. `seed` also
            seeds the projection of random maps.

    Call arguments:
        query: `(batch, query_length, query_dim)`.
        value: `(batch, key_length, value_dim)`.
        key: Optional `(batch, key_length, key_dim)`; defaults to `value`.
        query_mask, value_mask, key_mask, attention_mask, return_attention_scores,
            training, use_causal_mask, state, document_ids: As `EfficientAttention`.

    Returns:
        `output` `(batch, query_length, output_dim)`; `(output, scores)` with
        `return_attention_scores`; `(output, state)` with `state`.

    Raises:
        ValueError: If an argument is invalid, or the feature map has too many
            features to help; on a call with `use_causal_mask` for a map that is not
            causal.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import LinearAttention
    >>> layer = LinearAttention(num_heads=4, key_dim=32)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer(x, x, use_causal_mask=True).shape
    (2, 1000, 64)

    Streaming, one token at a time, in constant memory:

    >>> state = layer.get_initial_state(batch_size=2)
    >>> y, state = layer(x[:, :1], x[:, :1], use_causal_mask=True, state=state)

    Reference:
        - [Katharopoulos et al., 2020](https://arxiv.org/abs/2006.16236)
    """

    takes_sliding_window = True

    def __init__(
        self,
        *args,
        feature_map="elu",
        window: int | None = None,
        normalize: bool = True,
        qk_norm: bool = False,
        temperature: float = 1.0,
        rotary_wavelength: float | None = None,
        chunk_size: int | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.feature_map = feature_maps.get(feature_map)
        self.window = self._window_or(window)
        self.keep(locals(), omit=("feature_map", "window"))
        self._check_window()
        check_bool("normalize", normalize)
        check_bool("qk_norm", qk_norm)
        check_positive_int("chunk_size", chunk_size, optional=True)
        check_positive_number("temperature", temperature)
        check_rotary_wavelength(rotary_wavelength, self._key_dim)
        # Kept as given, for `get_config`.
        self._feature_map_identifier = feature_map
        self._feature_dim = self.feature_map.feature_dim(self._key_dim)
        self._scale = self.temperature**-0.5
        if self.feature_map.estimates_softmax:
            self._scale *= self._key_dim**-0.25

    def _check_window(self):
        check_positive_int("window", self.window, optional=True)
        if self.window is None or self.feature_map.estimates_softmax:
            return
        estimating = ", ".join(feature_maps.names("estimates_softmax"))
        raise ValueError(
            "`window` needs a feature map that estimates exp(q·k), one of "
            f"{estimating}. Received: window={self.window}, "
            f"sliding_window={self._sliding_window}, "
            f"feature_map={self.feature_map.name!r}"
        )

    @property
    def feature_dim(self):
        """Number of features per head."""
        return self._feature_dim

    @property
    def estimates_softmax(self):
        return (
            self.feature_map.estimates_softmax
            and self.normalize
            and not self.qk_norm
            and self.temperature == 1.0
            and self.rotary_wavelength is None
            and not self._use_gate
        )

    @property
    def takes_documents(self):
        # Other maps read the whole sequence.
        return self.feature_map.causal

    @property
    def estimates_beyond_window(self):
        return self.window is not None

    @property
    def takes_window_bias(self):
        return self.window is not None

    def operations(self, length, causal):
        heads, dim, value_dim = self._num_heads, self._key_dim, self._value_dim
        features = 4 * heads * self.feature_map.multiplications(dim)
        sums = 4 * heads * value_dim * self._feature_dim
        window = min(self.window or 0, length)
        per_pair = 2 * heads * (dim + value_dim)
        pairs = count_pairs(window, length, causal)
        return (features + sums) * length + per_pair * pairs

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        self._projection_seed = None
        if self.feature_map.random:
            self._projection_seed = keras.random.SeedGenerator(self.seed)
        self._map_variables = self.feature_map.create_weights(
            self, self._projection_seed
        )

    def state_spec(self, batch_size, max_length):
        if not self.feature_map.causal:
            return None
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

    def split_reach(self, call):
        if self.window is None:
            return 0
        check_split_is_causal(call.causal)
        return self.window

    def attend(self, query, key, value, call):
        tensors, options, position = self._prepare_call(query, key, value, call)
        config, windowed = self._config(call.causal), self.window is not None
        if windowed:
            dtype = tensors[0].dtype
            bias = self._bias_of_window(self.window, call.causal, dtype)
        if call.split is not None:
            attend, whole = split_linear.linear_attention, options["map_weights"]
            if windowed:
                attend = split_linear.windowed_attention
                whole = whole, bias
            split_tensors = *tensors, call.key_mask, None
            heads, state = call.split.run(attend, split_tensors, whole, config), None
        elif windowed:
            heads, state = windowed_linear_attention(
                tensors, config, window_bias=bias, lengths=call.lengths, **options
            )
        else:
            (heads,), state = linear_attention_with_feature_maps(
                tensors, config, **options
            )
        if position is not None:
            state["position"] = position + call.positions_read(query)
        if self._dropout > 0.0:
            heads = self._dropout_layer(heads, training=call.training)
        return heads, state

    def _prepare_call(self, query, key, value, call):
        """What the operation takes.

        Returns:
            `(tensors, options, position)`: queries and keys, prepared, and values; the
            operation's keyword arguments; and the position of the first query, if the
            layer rotates and has a state.
        """
        state, position = call.state, None
        if self.rotary_wavelength is not None and state is not None:
            state = dict(state)
            position = state.pop("position")
        dtype = accumulator_dtype(query, key, value)
        start = call.documents.position if call.documents else position
        query = self._prepare(query, dtype, start)
        key = self._prepare(key, dtype, start)
        query, key, map_weights = self._map_inputs(query, key, call)
        options = dict(
            map_weights=map_weights,
            key_mask=call.key_mask,
            state=state,
            documents=call.documents,
        )
        return (query, key, value), options, position

    def _map_inputs(self, query, key, call):
        """Queries and keys as the feature map's input, and the tensors it reads."""
        # Copies: PyTorch assigns in place, and a second call in a step may redraw the
        # features before the gradient of the first.
        weights = (ops.copy(ops.cast(w, query.dtype)) for w in self._map_variables)
        return (
            query,
            key,
            self.feature_map.map_weights(tuple(weights), query, key, call),
        )

    def _config(self, causal):
        return make_config(
            self.feature_map,
            self._feature_dim,
            causal,
            self.chunk_size,
            self.normalize,
            self.window,
        )

    def _check_call(self, query, value, key, call):
        if call.causal and not self.feature_map.causal:
            raise ValueError(
                f"feature_map={self.feature_map.name!r} reads the whole sequence and "
                "has no causal form; use another, such as 'favor+' or 'hyperbolic'. "
                "Received: use_causal_mask=True"
            )
        lengths = query.shape[1], key.shape[1]
        if self.window is not None and None not in lengths and len(set(lengths)) > 1:
            raise ValueError(
                "`query` and `key` must have the same length for a `window`. Received: "
                f"query length {lengths[0]}, key length {lengths[1]}"
            )

    def get_config(self):
        feature_map = self._feature_map_identifier
        if not isinstance(feature_map, str):
            feature_map = keras.saving.serialize_keras_object(feature_map)
        return {
            **super().get_config(),
            **self._window_config(),
            "feature_map": feature_map,
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if not isinstance(config.get("feature_map", ""), str):
            config["feature_map"] = keras.saving.deserialize_keras_object(
                config["feature_map"]
            )
        return super().from_config(config)


# Bounded: users may create maps. Equal configurations are one object for a compiler.
@functools.lru_cache(256)
def make_config(feature_map, feature_dim, causal, chunk_size, normalize, window):
    """The operation's `LinearAttentionConfig`, from a layer's arguments."""
    query_map, key_map = feature_map.query_features, feature_map.key_features
    if type(feature_map).key_features is FeatureMap.key_features:
        key_map = query_map
    return LinearAttentionConfig(
        query_map,
        key_map,
        feature_dim,
        causal=causal,
        chunk_size=chunk_size,
        output="normalized" if normalize else "sum",
        window=window,
        rowwise_maps=feature_map.rowwise,
        entrywise=feature_map.entrywise,
    )
