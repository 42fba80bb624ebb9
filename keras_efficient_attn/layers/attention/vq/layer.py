"""VQAttention: softmax attention over vector-quantised keys, in linear time."""

import dataclasses
import functools

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.distribution.sequence_parallel import check_split_is_causal
from keras_efficient_attn.distribution.windows import (
    vq_attention as split_vq_attention,
)
from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.calibration import calibration_batches
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.layers.attention.vq.codebooks import (
    CodeOptions,
    Coordinates,
    MixtureCodebook,
    MovingCodebook,
)
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    check_rate,
    check_rotary_wavelength,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.positions import (
    bias_products,
    window_sinusoids,
)
from keras_efficient_attn.ops.common.rows import Rows
from keras_efficient_attn.ops.reversible.remembered import (
    RECORDS,
    cache_for_backward,
    is_replay,
)
from keras_efficient_attn.ops.vq_attention.calibration import fit_codes
from keras_efficient_attn.ops.vq_attention.codebook import look_up, nearest_codes
from keras_efficient_attn.ops.vq_attention.config import (
    Codebook,
    Keys,
    Positions,
    VQConfig,
    num_features,
    state_spec,
)
from keras_efficient_attn.ops.vq_attention.windowed import attend_to_keys_and_codes

# Longest wavelength of the sinusoids of relative positions, over 2π.
MAX_WAVELENGTH = 100_000.0

# Default number of keys that are attended to exactly.
WINDOW = 128


@register_attention("vq")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class VQAttention(EfficientAttention):
    """Softmax attention to near keys and to the codes of far ones, in linear time.

    Each head has a codebook. A query sees the keys of a window exactly, and every key
    beyond it as its code, so that far keys can be summarised per code by their number
    and the mean of their values:

    ```
    w[t, s] = exp(q[t]·k[s])                     if |t − s| < window
              Σ_c p(c | k[s]) exp(q[t]·code[c])  otherwise
    head[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    Queries and keys are RMS-normalised, without gain, and scaled by `key_dim^(-1/4)`.
    Time and memory grow linearly with the length; a causal layer needs a state of
    constant size. The codes are

    - **hard** (Transformer-VQ): `p` is 1 for the nearest code; after `calibrate`, by
      the distance as queries see it. Codes are moving averages of the keys nearest to
      them, updated after each training call; keys learn from the window and from a
      commitment loss, its `commitment_weight` times the mean over positions of
      `Σ_heads ‖key − code‖²`.
    - **soft**: `p(c | k) = softmax(−‖k − code‖² / 2σ² − key_dim log σ + log weight)`,
      the responsibilities of a Gaussian mixture. Everything is differentiable, and
      codes are trained like other weights. For σ → 0 they become hard codes; with
      random codes, σ = 1 and weights `exp(‖code‖² / 2)` they are Performer's features,
      normalised per key (`keras_efficient_attn.ops.soft_codes`).

    With `order=2` the weight of a far key is expanded around its nearest code; `δ` is
    the key minus the code:

    ```
    exp(q·code) (1 + x + x²/2 + y/2)
    x = Σ_{i < rank} q[i] δ[i]    y = Σ_{i ≥ rank} q[i]² mean(δ[i]²)
    ```

    It stays positive. The mean is over the far keys of a code on the same side of the
    query, and `i` runs over coordinates that `calibrate` fits to data, ordered by how
    much keys differ from their codes as the queries see them. One code with all
    coordinates gives Taylor features. The state grows by the factor `(rank + 1)(rank +
    2) / 2`, and keys learn from queries beyond the window too.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the concatenated
            heads), `use_bias`, ….
        num_codes: Codes per head. Defaults to 512.
        window: Number of nearest keys to attend to exactly: a query sees itself and
            `window - 1` earlier keys and, if not causal, as many later ones, by index.
            `None` uses codes for all keys. Defaults to 128.
        codes: `"hard"` (the default), `"soft"`, or `CodeOptions`, which also say how
            codes are learned: momentum, commitment, widths and weights.
        order: 0 (the default): a far key has the weight of its code. 2: the weight is
            expanded around the code to second order; needs hard codes.
        rank: With `order=2`, the number of coordinates to expand; of the others only
            the mean squares count. Defaults to `None`: all of `key_dim`.
        quantize_window: Whether keys in the window are also replaced by their codes,
            with straight-through gradients, as in Transformer-VQ. Needs hard codes.
            Defaults to `False`.
        gradient_through_cache: Whether values (with `order=2` keys; for soft codes,
            keys and codes) learn from queries beyond the window. Defaults to `True`.
        relative_positions: Whether logits in the window have a term for the distance,
            as in Transformer-XL, `(q + u)·k + (q + v)·r[t − s]`. Defaults to `False`.
        position_dropout: Rate of dropout on the sinusoids of relative positions.
            Defaults to 0.
        qk_norm: Whether queries and keys are RMS-normalised. `False` keeps the keys'
            norms, as in a model trained with softmax. Defaults to `True`.
        rotary_wavelength: Longest wavelength of rotary positions, applied to
            queries and keys before they are quantised, such as 10,000. Defaults to
            `None`: no positions.
        block_length: Positions per block; affects speed only. Defaults to a value that
            suits the device and the codes: 128 to 256 on a CPU. With `order=2`, a
            sequence of at most this many positions, or 512, is computed in one block.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`. `seed` also
            seeds the codebook.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`. With
        `training=True` hard codes are updated from unmasked keys. If `keras.remat`
        reruns a block that calls the layer once, they are updated once. On JAX,
        `keras.remat` around a layer with state is an error of JAX; on TensorFlow it
        leaves the commitment loss without gradient.

    Returns:
        As `EfficientAttention`: `(batch, query_length, output_dim)`, with the scores or
        the new state on request.

    Raises:
        ValueError: If an argument is invalid, or needs hard codes and they are soft.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import VQAttention
    >>> layer = VQAttention(num_heads=4, key_dim=32, num_codes=64, window=32)
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer(x, x, use_causal_mask=True).shape
    (2, 1000, 64)

    Replacing trained softmax attention, without training:

    >>> layer = VQAttention(num_heads=4, key_dim=32, qk_norm=False)
    >>> layer.build(x.shape, x.shape)  # Then `layer.set_weights(...)`.
    >>> error = layer.calibrate(x)

    Reference:
        - [Lingle, 2023](https://arxiv.org/abs/2309.16354), Transformer-VQ
        - [Su, 2023](https://kexue.fm/archives/9862), soft codes and Performer
    """

    takes_sliding_window = True
    takes_documents = True
    can_calibrate = True

    def __init__(
        self,
        *args,
        num_codes: int = 512,
        window: int | None = WINDOW,
        codes: str | dict | CodeOptions = "hard",
        order: int = 0,
        rank: int | None = None,
        quantize_window: bool = False,
        gradient_through_cache: bool = True,
        relative_positions: bool = False,
        position_dropout: float = 0.0,
        qk_norm: bool = True,
        rotary_wavelength: float | None = None,
        block_length: int | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        check_positive_int("num_codes", num_codes)
        self.num_codes, self.codes = num_codes, CodeOptions.get("codes", codes)
        self.config = VQConfig(
            soft=self.codes.is_soft,
            order=order,
            rank=rank,
            window=self._window_or(window, default=WINDOW),
            quantize_window=quantize_window,
            relative_positions=relative_positions,
            gradient_through_cache=gradient_through_cache,
            block_length=block_length,
        )
        self.config.check_key_dim(self._key_dim)
        for name in ("quantize_window", "gradient_through_cache", "relative_positions"):
            check_bool(name, getattr(self.config, name))
        check_bool("qk_norm", qk_norm)
        check_rotary_wavelength(rotary_wavelength, self._key_dim)
        check_rate("position_dropout", position_dropout)
        if position_dropout and not relative_positions:
            raise ValueError(
                "`position_dropout` needs `relative_positions=True`. Received: "
                f"position_dropout={position_dropout!r}"
            )
        self._position_dropout = keras.layers.Dropout(
            position_dropout,
            seed=self.seed,
            dtype=self.state_dtype,
            name="position_dropout",
        )
        self.keep(dict(qk_norm=qk_norm, rotary_wavelength=rotary_wavelength))
        # Of queries and of keys.
        self._scale = self._key_dim**-0.25

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        options = dict(seed=self.seed, dtype=self.dtype_policy, name="codebook")
        arguments = (self._num_heads, self._key_dim, self.num_codes, self.codes)
        if self.config.soft:
            self._codebook = MixtureCodebook(*arguments, **options)
        else:
            self._codebook = MovingCodebook(*arguments, **options)
            self._coordinates = Coordinates(
                self._num_heads,
                self._key_dim,
                dtype=self.dtype_policy,
                name="coordinates",
            )
            self._coordinates.build()
        self._codebook.build()
        if not self.config.relative_positions:
            return
        heads = (self._num_heads, self._key_dim)
        self._sinusoid_dim = 2 * ((query_shape[-1] + 1) // 2)
        self._content_bias = self.add_weight(
            name="content_bias", shape=heads, initializer="zeros"
        )
        self._position_bias = self.add_weight(
            name="position_bias", shape=heads, initializer="zeros"
        )
        self._position_kernel = self.add_weight(
            name="position_kernel",
            shape=(self._sinusoid_dim, *heads),
            initializer=self._new_kernel_initializer(),
        )

    @property
    def window(self):
        """Number of nearest keys that are attended to exactly, or `None`."""
        return self.config.window

    @window.setter
    def window(self, window):
        self.config = dataclasses.replace(self.config, window=window)

    @property
    def codebook(self):
        """The codes, a tensor `(heads, codes, key_dim)`.

        They are in the coordinates of the keys.
        """
        return self._codebook.codes

    @property
    def estimates_softmax(self):
        return (
            not self.qk_norm
            and not self.config.relative_positions
            and self.rotary_wavelength is None
            and not self._use_gate
        )

    @property
    def estimates_beyond_window(self):
        # Relative positions are distances in the window. With `quantize_window`, keys
        # there are codes, too.
        one_path = self.config.relative_positions or self.config.quantize_window
        return self.window is not None and not one_path

    @property
    def takes_window_bias(self):
        return self.window is not None and not self.config.relative_positions

    def operations(self, length, causal):
        heads, dim, value_dim = self._num_heads, self._key_dim, self._value_dim
        window = 0 if self.window is None else min(self.window, length)
        terms = 2 if self.config.relative_positions else 1
        per_pair = 2 * heads * (terms * dim + value_dim)
        # Find and weigh the code; read values and, for soft codes, write them.
        through_values = (4 if self.config.soft else 2) * value_dim
        if self.config.order == 2:
            through_values *= num_features(self.config.expanded_dims(dim))
        per_position = heads * self.num_codes * (4 * dim + through_values)
        pairs = count_pairs(window, length, causal)
        return per_position * length + per_pair * pairs

    def state_spec(self, batch_size, max_length):
        sizes = (self._num_heads, self.num_codes, self._key_dim, self._value_dim)
        spec = state_spec(batch_size, *sizes, self.config, self.state_dtype)
        if self.rotary_wavelength is not None:
            spec["position"] = ((batch_size,), "int32")
        return spec

    def split_reach(self, call):
        check_split_is_causal(call.causal)
        return self.window or 0

    def attend(self, query, key, value, call):
        state, key_mask = call.state, call.key_mask
        dtype, start = accumulator_dtype(query, key, value), None
        if self.rotary_wavelength is not None and state is not None:
            state = dict(state)
            start = state.pop("position")
        place = call.documents.position if call.documents else start
        query, key = (self._prepare(x, dtype, place) for x in (query, key))
        positions = None
        if self.config.relative_positions:
            positions = self._relative_positions(query, call)
            query = self._content_query(query)
        elif self.window_bias is not None and self.takes_window_bias:
            bias = self._bias_of_window(self.window, call.causal, dtype)
            positions = Positions(*bias_products(query, bias))
        learns = call.training and self._learns
        counted, valid = _countable(key, key_mask) if learns else (None, None)
        # Gradient checkpointing reruns with the codes of the first run.
        again = learns and is_replay()
        if again:
            codes = self._codebook.last_codes
        elif learns:
            codes = self._codebook.drawn_from(counted, valid)
        else:
            codes = self._codebook.codes
        codes = ops.cast(codes, dtype)
        book, index = Codebook(codes), None
        if self.config.soft:
            mixture = self._codebook.sigma, self._codebook.log_weights
            book = Codebook(codes, *mixture)
        else:
            metric = self._coordinates.metric(dtype)
            find = functools.partial(nearest_codes, key, codes, metric)
            # A rebuilt key has rounding errors, which must not change its code.
            index = cache_for_backward(find) if RECORDS else find()
        keys = Keys(key, value, key_mask, index)
        if self.config.order == 2:
            # Only expansions read single coordinates; products are the same in all.
            query, mapped, codebook = self._coordinates.map(query, key, codes)
            keys, book = keys._replace(key=mapped), Codebook(codebook)
        if call.split is None:
            heads, new_state = attend_to_keys_and_codes(
                query,
                keys,
                book,
                self.config,
                call.causal,
                positions,
                state,
                Rows(call.lengths, call.documents),
            )
        else:
            position_query, position_key = positions or (None, None)
            tensors, whole = (query, keys, position_query), (book, position_key)
            heads = call.split.run(split_vq_attention, tensors, whole, self.config)
            new_state = None
        if learns:
            loss = self._commitment(key, codes, index, valid)
            if not again:
                if self.codes.commitment_weight:
                    self.add_loss(loss)
                self._codebook.update(counted, index, valid, codes)
        if start is not None:
            new_state["position"] = start + call.positions_read(query)
        if self._dropout > 0.0:
            heads = self._dropout_layer(heads, training=call.training)
        return heads, new_state

    def calibrate(self, data, query=None, iterations: int = 20):
        """Fits the codes by k-means to the keys that this layer computes from data.

        The layer can then replace trained softmax attention without training. Hard
        codes are fitted in the metric of the queries, `E[(q·(key − code))²]`, in which
        keys are compared with codes from then on. The coordinates of `order=2` become
        those in which its terms are uncorrelated and decreasing. With `learn_sigma` or
        `learn_weights`, soft codes, widths and weights are then fitted by `iterations`
        steps of expectation-maximisation, which maximises the likelihood of the keys.

        Args:
            data: The `key` (or `value`) inputs of the layer: an array `(batch, length,
                dim)`, or an iterable of batches, each an array or, with padding, a pair
                of an array and a boolean `(batch, length)`, `True` for positions to
                use.
            query: The `query` inputs, in the same form; number and length may differ
                from `data`. Soft codes ignore it. Defaults to `data`: self-attention.
            iterations: Iterations of k-means after k-means++. Defaults to 20.

        Returns:
            `√(E[(q·(key − code))²] / E[(q·key)²])` of each head, as a NumPy array; for
            soft codes `√(Σ‖key − code‖² / Σ‖key‖²)` after k-means.

        Raises:
            ValueError: If the layer is not built, if a batch has the wrong type, or if
                there is no key or no query.
        """
        if not self.built:
            raise ValueError(
                "`calibrate()` needs a built layer, whose projections make the keys. "
                "Received: built=False"
            )
        keys, moments = [], np.zeros(())
        for x, mask in calibration_batches("data", data):
            keys.append(_finite(self._calibration_keys(x)[mask]))
            if query is None:
                moments = moments + _second_moments(self._calibration_queries(x)[mask])
        if query is not None:
            for x, mask in calibration_batches("query", query):
                moments = moments + _second_moments(self._calibration_queries(x)[mask])
        number = sum(map(len, keys))
        if not number:
            raise ValueError("`data` must hold at least one finite key. Received: none")
        if query is not None and not moments.any():
            raise ValueError(
                "`query` must hold at least one finite query. Received: none"
            )
        codes, maps, error = fit_codes(
            np.concatenate(keys),
            None if self.config.soft else moments,
            self.num_codes,
            iterations,
            self.seed,
        )
        if self.config.soft:
            self._codebook.fit(np.concatenate(keys), codes, iterations)
        else:
            self._codebook.assign(codes)
            self._coordinates.assign(*maps)
        return error

    def codebook_usage(self):
        """The share of hard codes that had a key in the last `revive_after` calls.

        A number from 0 to 1, over training calls (100 if `revive_after` is `None`). New
        codes count as used.
        """
        self._check_hard("codebook_usage")
        calls = self.codes.revive_after or CodeOptions.revive_after
        return float(np.mean(self._codebook.idle_calls() < calls))

    def codebook_entropy(self):
        """The entropy of the keys' codes, in bits, averaged over heads.

        At most `log2(num_codes)`. Measured over recent training calls.
        """
        self._check_hard("codebook_entropy")
        usage = self._codebook.usage()
        share = usage / usage.sum(-1, keepdims=True)
        bits = share * np.log2(np.where(share > 0, share, 1.0))
        return float(-bits.sum(-1).mean())

    def quantization_error(self):
        """`√(Σ‖key − code‖² / Σ‖key‖²)` over recent training calls, averaged."""
        self._check_hard("quantization_error")
        return float(self._codebook.relative_error().mean())

    def get_config(self):
        attention = dataclasses.asdict(self.config)
        # Implied by the codes, and not an option of the layer.
        del attention["soft"], attention["kernels"]
        return {
            **super().get_config(),
            **attention,
            "num_codes": self.num_codes,
            "codes": self.codes.get_config(),
            **self._window_config(),
            "position_dropout": self._position_dropout.rate,
        }

    def _content_query(self, query):
        """Prepared queries, with the bias of relative positions."""
        bias = ops.cast(self._content_bias, query.dtype)
        return query + self._scale * bias

    def _calibration_keys(self, x):
        """Prepared keys of calibration data, `(batch, length, heads, key_dim)`."""
        key = self._for_query_heads(self._key_dense(ops.convert_to_tensor(x)))
        return ops.convert_to_numpy(self._prepare(key, accumulator_dtype(key), None))

    def _calibration_queries(self, x):
        """Prepared queries of calibration data, with bias, in the same shape."""
        query = self._query_dense(ops.convert_to_tensor(x))
        query = self._prepare(query, accumulator_dtype(query), None)
        if self.config.relative_positions:
            query = self._content_query(query)
        return ops.convert_to_numpy(query)

    def _relative_positions(self, query, call):
        """Prepared queries with bias, and a key for each distance in the window.

        Keys are `(distances, heads, key_dim)`.
        """
        waves = window_sinusoids(
            self.window, call.causal, self._sinusoid_dim, MAX_WAVELENGTH, query.dtype
        )
        waves = ops.cast(
            self._position_dropout(waves, training=call.training), query.dtype
        )
        bias, kernel = (
            ops.cast(weight, query.dtype)
            for weight in (self._position_bias, self._position_kernel)
        )
        key = ops.einsum("md,dhk->mhk", waves, kernel)
        return Positions(query + self._scale * bias, self._scale * key)

    @property
    def _learns(self):
        return self.trainable and not self.config.soft

    def _scores(self, query, key, value, call):
        if call.training and self._learns:
            # The first call draws the codes here, before they are used.
            prepared = self._prepare(key, accumulator_dtype(query, key, value), None)
            self._codebook.drawn_from(*_countable(prepared, call.key_mask))
        return super()._scores(query, key, value, call)

    def _commitment(self, key, codes, index, valid):
        """The loss that pulls keys towards their codes."""
        codes = ops.stop_gradient(look_up(codes, index))
        # A key that overflowed has no finite error.
        errors = ops.where(valid[..., None, None] > 0, key - codes, 0.0)
        number = ops.sum(valid)
        mean = ops.sum(ops.square(errors)) / ops.where(number > 0, number, 1.0)
        return self.codes.commitment_weight * mean

    def _check_hard(self, method):
        if self.config.soft or not self.built:
            raise ValueError(
                f"`{method}()` needs a built layer with hard codes. Received: "
                f"codes={self.codes.assignment!r}, built={self.built}"
            )


def _countable(key, key_mask):
    """Keys that update a codebook, and 1 for them, `(batch, length)`; zeros for others.

    Keys that overflowed do not count: in a moving average they would stay for good.
    """
    key = ops.stop_gradient(key)
    batch, length = shape_of(key)[:2]
    # The sum over the batch of squared distances to codes is finite as well.
    terms = 4.0 * ops.cast(batch * length, key.dtype)
    squares = terms * ops.sum(ops.square(key), axis=(2, 3))
    valid = ops.isfinite(squares)
    if key_mask is not None:
        valid = ops.logical_and(valid, ops.cast(key_mask, "bool"))
    key = ops.where(valid[..., None, None], key, ops.zeros_like(key))
    return key, ops.cast(valid, key.dtype)


def _second_moments(x):
    """`Σ x xᵀ` of each head for `(number, heads, dim)`: `(heads, dim, dim)`."""
    x = np.asarray(_finite(x), "float64")
    return np.einsum("nhd,nhe->hde", x, x, optimize=True)


def _finite(x):
    """The vectors `(number, heads, dim)` that are finite in all heads."""
    return x[np.isfinite(x).all((1, 2))]
