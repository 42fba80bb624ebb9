"""FourierAttention: FourierFormer's product of even powers of sin(z)/z."""

import math

import keras
from keras import ops

from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.layers.attention.softmax import cache_spec, extend_cache
from keras_efficient_attn.ops import fourier
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_positive_int,
    check_positive_number,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.feature_kernels.choice import LinearAttentionConfig
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, wide_dtype
from keras_efficient_attn.ops.common.online_softmax import divide
from keras_efficient_attn.ops.common.state import nan_beyond
from keras_efficient_attn.ops.fourier.kernel import FourierConfig
from keras_efficient_attn.ops.fourier.tiled import fourier_sums
from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention_state_spec,
    linear_attention_with_feature_maps,
)
from keras_efficient_attn.ops.linear_attention.feature_maps import (
    MAX_POLYNOMIAL_FEATURES,
)

RADIUS_SHARING = ("layer", "head", "dimension")
# With fewer, the linear form of short heads is too inaccurate.
LEAST_FREQUENCIES = 8


@register_attention("fourier")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class FourierAttention(EfficientAttention):
    """FourierFormer's attention, a drop-in replacement for `MultiHeadAttention`.

    The weight of key `s` for query `t` is a product over the dimensions of a head:

    ```
    w[t, s] = Π_d (sin z_d / z_d)^power,   z = R ∘ (q[t] − k[s])
    head[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    the generalised Fourier regression estimator, with a learned `R > 0`. It depends on
    `q` and `k` only through their difference, unlike softmax.

    **Exact** (the default): time grows with the square of the length, memory linearly.
    Weights are computed as logarithms, relative to the largest of their row, for a tile
    of queries at a time, and recomputed for the gradient.

    **Linear** (`linear=True`): `w` is the square of `Π (sin z_d / z_d)^(power/2)`, of
    which `num_frequencies = M` random frequencies give an estimate. Its square is never
    negative, and is linear attention with `M(2M + 1)` features and a state of constant
    size. The weights' relative error is about `ops.fourier.linear_error(R, key_dim, M,
    power)` for standard normal queries and keys and independent frequencies, and falls
    with `√M`; orthogonal frequencies have a smaller error, about half for large `M`.
    Relative errors of the heads, 128 keys, `power=4`, `M = key_dim` of 16, 32 and 64
    (528, 2,080 and 8,256 features), in brackets the error of the mean of all values:

    | R | 16 | 32 | 64 |
    |---|---|---|---|
    | 0.60 / √key_dim | 0.02 (0.16) | 0.02 (0.11) | 0.01 (0.07) |
    | 0.87 / √key_dim (the default) | 0.09 (0.30) | 0.07 (0.22) | 0.05 (0.15) |
    | 1.30 / √key_dim | 0.36 (0.56) | 0.33 (0.45) | 0.26 (0.33) |

    As `M` grows, the error tends to 0 with either kind of frequencies: orthogonal ones
    tend to the kernel's law. With `M` up to `key_dim`, the default among them, they
    all have one length, `√(key_dim · power / 6)`, in place of the law's several. Their
    estimate then tends to a kernel that depends almost on `‖z‖` alone, near a Gaussian
    one, and keeps this error however many draws are averaged. It is of the fourth
    order in `z`: small where weights are large, largest for far keys and for keys that
    differ from the query along few dimensions. `ops.fourier.kernel_frequencies` has
    the construction.

    So it serves wide kernels, which hardly differ from Gaussian ones. Narrow ones, the
    exact form's default among them, want the exact form; a radius for which the weights
    are noise from the start is refused, and training may still lead there.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the concatenated
            heads: the weights never exist as a whole), `use_bias`, ….
        power: 2, 4, 6 or 8. Defaults to 4, the paper's φ(x) = x⁴.
        radius_per: Granularity of `R`: `"layer"` (one number, as in the paper),
            `"head"` (the default) or `"dimension"` (each dimension of each head).
        initial_radius: Positive float. Defaults to `√(3 / power) · key_dim^(−1/4)`, for
            which the kernel has the curvature of `exp(−‖q − k‖² / (2 √key_dim))`,
            softmax attention's kernel for keys of one norm; with `linear`, to `√(3 /
            (power · key_dim))`. The paper uses 2.0 for text and 1.0 for images; with
            standard normal heads of 16, a query then sees one or two keys.
        linear: Whether to compute the linear form. Defaults to `False`.
        num_frequencies: Random frequencies of the linear form. Defaults to `max(8,
            key_dim)`.
        orthogonal: Whether the frequencies, as a matrix, have orthogonal rows or, with
            more than `key_dim` of them, orthogonal columns, after they are drawn from
            the kernel's spectral distribution. `False` leaves them independent.
            Defaults to `True`.
        chunk_size: Minimum number of queries per tile; with `linear`, positions per
            chunk. Affects speed and memory only. Defaults to a value that suits the
            device: 4 on a CPU, 64 with `linear`.
        implementation: Implementation of the exact form: `"tiled"` (the default);
            `"fused"`, for which PyTorch needs a compiler; or `"reference"`, the
            definition. See `ops.fourier_attention`.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`. `seed` also
            seeds the frequencies.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`.

    Returns:
        As `EfficientAttention`: `(batch, query_length, output_dim)`, with the scores or
        the new state on request.

    Raises:
        ValueError: If an argument is invalid, or given for a form that does not use it;
            if the linear form would have too many features to help, or weights that are
            noise.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import FourierAttention
    >>> layer = FourierAttention(num_heads=4, key_dim=32)
    >>> x = keras.random.normal((2, 100, 64))
    >>> output = layer(x, x)
    >>> layer.radius.shape  # One for each head.
    (4, 1)

    Streaming, with a cache of 100 positions:

    >>> state = layer.get_initial_state(batch_size=2, max_length=100)
    >>> y, state = layer(x[:, :1], x[:, :1], use_causal_mask=True, state=state)

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206)
    """

    def __init__(
        self,
        *args,
        power: int = 4,
        radius_per: str = "head",
        initial_radius: float | None = None,
        linear: bool = False,
        num_frequencies: int | None = None,
        orthogonal: bool = True,
        chunk_size: int | None = None,
        implementation: str | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.keep(locals())
        self._check_arguments()
        if linear:
            self._check_linear()

    @property
    def takes_documents(self):
        # The definition is for one document in each row.
        return self.implementation != "reference"

    @property
    def feature_dim(self):
        """Number of features per head of the linear form, or `None`."""
        if not self.linear:
            return None
        return fourier.squared_features_size(self._frequency_count)

    @property
    def radius(self):
        """`R`, a tensor of shape `()`, `(heads, 1)` or `(heads, key_dim)`."""
        return ops.exp(ops.convert_to_tensor(self._log_radius))

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        # Do not cast these to the compute dtype, which would round them.
        dtype = wide_dtype(self.variable_dtype)
        heads, dim = self._num_heads, self._key_dim
        shapes = {"layer": (), "head": (heads, 1), "dimension": (heads, dim)}
        self._log_radius = self.add_weight(
            name="log_radius",
            shape=shapes[self.radius_per],
            initializer=keras.initializers.Constant(math.log(self._first_radius)),
            dtype=dtype,
        )
        if not self.linear:
            return
        seed = keras.random.SeedGenerator(self.seed)
        self._frequencies = self.add_weight(
            name="frequencies",
            shape=(self._frequency_count, dim),
            initializer=lambda shape, dtype: ops.cast(
                fourier.kernel_frequencies(*shape, self.power, self.orthogonal, seed),
                dtype,
            ),
            dtype=dtype,
            trainable=False,
        )

    @property
    def state_grows(self):
        return not self.linear

    def state_spec(self, batch_size, max_length):
        heads, dtype = self._num_heads, self.state_dtype
        if self.linear:
            sizes = (batch_size, heads, self.feature_dim, self._value_dim)
            return linear_attention_state_spec(*sizes, dtype)
        sizes = (heads, self._key_dim, self._value_dim)
        return cache_spec(batch_size, max_length, *sizes, dtype)

    def operations(self, length, causal):
        heads, dim, value_dim = self._num_heads, self._key_dim, self._value_dim
        if not self.linear:
            # Per key dimension: difference, sine, quotient and product.
            per_pair = 2 * heads * (2 * dim + value_dim)
            return per_pair * count_pairs(length, length, causal)
        features = 4 * heads * dim * self._frequency_count
        return (features + 4 * heads * value_dim * self.feature_dim) * length

    def attend(self, query, key, value, call):
        dtype = accumulator_dtype(query, key, value)
        attend = self._attend_linear if self.linear else self._attend_exact
        heads, state = attend(
            *(ops.cast(x, dtype) for x in (query, key, value, self.radius)), call
        )
        if self._dropout > 0.0:
            heads = self._dropout_layer(heads, training=call.training)
        return heads, state

    def _attend_linear(self, query, key, value, radius, call):
        (heads,), state = linear_attention_with_feature_maps(
            (query * radius, key * radius, value),
            LinearAttentionConfig(
                fourier.squared_features,
                fourier.squared_features,
                self.feature_dim,
                causal=call.causal,
                chunk_size=self.chunk_size,
            ),
            map_weights=(ops.cast(self._frequencies, query.dtype),),
            key_mask=call.key_mask,
            state=call.state,
            documents=call.documents,
        )
        return heads, state

    def _attend_exact(self, query, key, value, radius, call):
        state, key_mask, first_position = call.state, call.key_mask, 0
        if call.documents is not None:
            config = FourierConfig(
                self.power, call.causal, self.chunk_size, self.implementation
            )
            values, totals, _ = fourier_sums(
                (query, key, value), radius, config, key_mask, 0, call.documents
            )
            return divide(values, totals), None
        if state is not None:
            state, key, value, key_mask, first_position = extend_cache(
                state, key, value, key_mask
            )
        heads = fourier.fourier_attention(
            query,
            key,
            value,
            radius,
            power=self.power,
            key_mask=key_mask,
            causal=call.causal,
            first_position=first_position,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        if state is not None:
            heads = nan_beyond(shape_of(state["key"])[1], state["position"], heads)
        return heads, state

    @property
    def _frequency_count(self):
        return self.num_frequencies or max(LEAST_FREQUENCIES, self._key_dim)

    @property
    def _first_radius(self):
        if self.initial_radius is not None:
            return self.initial_radius
        exponent = -0.5 if self.linear else -0.25
        return math.sqrt(3 / self.power) * self._key_dim**exponent

    def _check_arguments(self):
        FourierConfig(
            power=self.power,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        check_name("radius_per", self.radius_per, RADIUS_SHARING)
        check_bool("linear", self.linear)
        check_bool("orthogonal", self.orthogonal)
        check_positive_number("initial_radius", self.initial_radius, optional=True)
        check_positive_int("num_frequencies", self.num_frequencies, optional=True)
        if not self.linear and (
            self.num_frequencies is not None or self.orthogonal is not True
        ):
            raise ValueError(
                "`num_frequencies` and `orthogonal` need `linear=True`. Received: "
                f"num_frequencies={self.num_frequencies}, orthogonal={self.orthogonal}"
            )

    def _check_linear(self):
        if self.implementation is not None:
            raise ValueError(
                "`implementation` applies to linear=False only: leave it out. "
                f"Received: linear=True, implementation={self.implementation!r}"
            )
        if self.feature_dim > MAX_POLYNOMIAL_FEATURES:
            raise ValueError(
                "The linear form has M(2M + 1) features of M frequencies, by default "
                f"max({LEAST_FREQUENCIES}, key_dim). Received: "
                f"key_dim={self._key_dim}, num_frequencies={self.num_frequencies}, "
                f"which makes {self.feature_dim} features; more than "
                f"{MAX_POLYNOMIAL_FEATURES} cost more than the exact form. Use a "
                "smaller `key_dim` or fewer frequencies."
            )
        error = fourier.linear_error(
            self._first_radius, self._key_dim, self._frequency_count, self.power
        )
        if error >= 1:
            raise ValueError(
                "The linear form would be too inaccurate: for standard normal "
                f"queries and keys their relative error is {error:.1f}. Received: "
                f"initial_radius={self._first_radius}, key_dim={self._key_dim}, "
                f"num_frequencies={self._frequency_count}, power={self.power}. Use a "
                "smaller radius, more frequencies, or `linear=False`."
            )
