"""SoftmaxAttention: softmax attention with this package's masks and states."""

import keras
from keras import ops

from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.backend import is_traced_by_torch, shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_name,
    check_positive_int,
    check_positive_number,
    check_rotary_wavelength,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    pad,
    rms_normalize,
)
from keras_efficient_attn.ops.common.rows import row_lengths
from keras_efficient_attn.ops.common.state import (
    RECENT,
    nan_beyond,
    recent_keys_spec,
    write_positions,
)

KERNELS = ("dot_product", "gaussian")


@register_attention("softmax")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SoftmaxAttention(EfficientAttention):
    """Softmax attention over all keys, with this package's masks and states.

    ```
    w[t, s] = exp(query[t] · key[s] / √key_dim)
    head[t] = Σ_s w[t, s] value[s] / Σ_s w[t, s]
    ```

    computed by the backend's fused kernel if available. The state is a cache of keys
    and values, of the length given to `get_initial_state`. Unlike the states of the
    efficient layers, it grows with the context, and so does the time per token.

    `kernel="gaussian"` weighs keys by their distance, `w[t, s] = exp(-‖query[t] −
    key[s]‖² / (2 √key_dim))`: the Nadaraya–Watson estimator with a Gaussian kernel of
    variance `√key_dim`. For keys of one norm it is softmax attention.

    Args:
        *args, **kwargs: Arguments of `EfficientAttention`; `sliding_window` and
            `flash_attention` as in `keras.layers.MultiHeadAttention`. `dropout` acts
            on the normalised weights, and needs the matrix of weights.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000. Defaults to `None`: no positions.
        kernel: `"dot_product"` (the default) or `"gaussian"`, whose heads are wider by
            one than flash kernels take.
        projection_norm: `"rms"` for queries and keys with a mean square of 1 over all
            heads together, times learned gains, before the rotation. Defaults to
            `None`: no norm.
        projection_norm_epsilon: Added to the mean square. Defaults to 1e-6.
        use_output_bias: Whether the output projection has a bias. Defaults to `None`:
            `use_bias`.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`.

    Returns:
        As `EfficientAttention`.

    Raises:
        ValueError: For a `rotary_wavelength` that is not positive or with an odd
            `key_dim`; for another `kernel`, or `"gaussian"` with
            `flash_attention=True`.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import SoftmaxAttention
    >>> layer = SoftmaxAttention(num_heads=2, key_dim=8)
    >>> x = keras.random.normal((1, 5, 16))
    >>> layer.build(x.shape, x.shape)
    >>> state = layer.get_initial_state(batch_size=1, max_length=100)
    >>> y, state = layer(x, x, use_causal_mask=True, state=state)
    >>> y.shape
    (1, 5, 16)

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206), on the Gaussian
          kernel
        - [OLMo et al., 2024](https://arxiv.org/abs/2501.00656), on `projection_norm`
    """

    takes_sliding_window = takes_flash_attention = True
    takes_documents = True
    state_grows = True

    def __init__(
        self,
        *args,
        rotary_wavelength: float | None = None,
        kernel: str = "dot_product",
        projection_norm=None,
        projection_norm_epsilon: float = 1e-6,
        use_output_bias: bool | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        check_name("kernel", kernel, KERNELS)
        if kernel == "gaussian" and self._flash_attention:
            raise ValueError(
                "`flash_attention=True` needs kernel='dot_product'. Received: "
                "flash_attention=True, kernel='gaussian'"
            )
        if projection_norm not in (None, "rms"):
            raise ValueError(
                "`projection_norm` must be 'rms' or None. Received: "
                f"projection_norm={projection_norm!r}"
            )
        check_positive_number("projection_norm_epsilon", projection_norm_epsilon)
        check_bool("use_output_bias", use_output_bias, optional=True)
        self.keep(locals())
        check_rotary_wavelength(rotary_wavelength, self._key_dim)

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        if self.projection_norm is not None:
            queries, keys, _ = self._projected_heads
            for name, heads in (("query", queries), ("key", keys)):
                gain = self.add_weight(
                    name=f"{name}_norm_scale",
                    shape=(heads, self._key_dim),
                    initializer="ones",
                )
                setattr(self, f"_{name}_norm_scale", gain)

    def _make_output_dense(self, *args, **kwargs):
        # Keras asks `_use_bias`.
        use_bias = self._use_bias
        if self.use_output_bias is not None:
            self._use_bias = self.use_output_bias
        try:
            return super()._make_output_dense(*args, **kwargs)
        finally:
            self._use_bias = use_bias

    @classmethod
    def conversion_refusal(cls, options):
        if options.get("kernel", "dot_product") != "dot_product":
            return None
        return "it is softmax. To keep softmax in a layer, leave it out of `layers`."

    @property
    def is_softmax(self):
        plain = self.kernel == "dot_product" and self.projection_norm is None
        return plain and self.rotary_wavelength is None

    def state_spec(self, batch_size, max_length):
        sizes = (self._num_heads, self._key_dim, self._value_dim)
        # The cache has the compute dtype: reading it dominates the cost of a token.
        return cache_spec(batch_size, max_length, *sizes, self.compute_dtype)

    def operations(self, length, causal):
        window = min(self._sliding_window or length, length)
        per_pair = 2 * self._num_heads * (self._key_dim + self._value_dim)
        return per_pair * count_pairs(window, length, causal)

    def _project_inputs(self, query, key, value, call):
        if self.projection_norm is None:
            return super()._project_inputs(query, key, value, call)
        query = self._normalize(self._query_dense(query), self._query_norm_scale)
        key = self._normalize(self._key_dense(key), self._key_norm_scale)
        key, value = map(self._for_query_heads, (key, self._value_dense(value)))
        return query, key, value, call

    def _normalize(self, heads, gain):
        """Projected heads, of mean square 1 over all of them, times their gains."""
        wide = ops.cast(heads, accumulator_dtype(heads))
        batch, length, number, dim = shape_of(wide)
        flat = ops.reshape(wide, (batch, length, number * dim))
        flat = rms_normalize(flat, self.projection_norm_epsilon)
        wide = ops.reshape(flat, (batch, length, number, dim))
        return ops.cast(wide * ops.cast(gain, wide.dtype), heads.dtype)

    def attend(self, query, key, value, call):
        heads, state = self._attend(query, key, value, call)
        if state is not None:
            heads = nan_beyond(shape_of(state["key"])[1], state["position"], heads)
        return heads, state

    def _attend(self, query, key, value, call):
        state, start, key_mask = call.state, None, call.key_mask
        position = None if state is None else state["position"]
        position = call.documents.position if call.documents else position
        dtype = keras.backend.standardize_dtype(query.dtype)
        query, key = self._rotate(query, position), self._rotate(key, position)
        if state is not None:
            state, key, value, key_mask, start = extend_cache(
                state, key, value, key_mask
            )
            key_mask = key_mask > 0
        if self.kernel == "gaussian":
            query, key, value = _by_distance(query, key, value)
            dtype = keras.backend.standardize_dtype(query.dtype)
        dropped = call.training and self._dropout > 0.0
        # Keras' fused kernels round float64 to float32.
        by_matrix = call.scores or dropped or dtype == "float64"
        # The kernel handles a causal mask itself, if no other hides keys.
        is_causal = call.causal and not by_matrix and self._sliding_window is None
        others = state, call.documents, key_mask
        is_causal = is_causal and all(each is None for each in others)
        mask = None
        if not is_causal:
            mask = self._mask(shape_of(query)[1], shape_of(key)[1], start, call.causal)
        if call.documents is not None:
            number = call.documents.number
            same = (number[:, :, None] == number[:, None])[:, None]
            mask = same if mask is None else ops.logical_and(mask, same)
        if key_mask is not None:
            keys = key_mask[:, None, None]
            mask = keys if mask is None else ops.logical_and(mask, keys)
        if by_matrix:
            return self._attend_by_matrix(query, key, value, mask, call), state
        if dtype == "float16" and not self._flash_attention:
            # The logits of large queries and keys overflow its range.
            query, key, value = (ops.cast(x, "float32") for x in (query, key, value))
        # Kernels need equal widths: pad with zeros, which change no logit and are cut
        # off the values.
        width = max(key.shape[-1], value.shape[-1])
        flash_attention = self._flash_attention
        if flash_attention is None and is_traced_by_torch():
            # Keras checks whether the flash kernel can run, which `torch.compile`
            # cannot trace. PyTorch makes this check itself.
            flash_attention = False
        heads = ops.dot_product_attention(
            *(_widen(x, width) for x in (query, key, value)),
            mask=mask,
            scale=self._inverse_sqrt_key_dim,
            is_causal=is_causal,
            flash_attention=flash_attention,
        )
        return _where_any(mask, heads[..., : value.shape[-1]]), state

    def _attend_by_matrix(self, query, key, value, mask, call):
        dtype = accumulator_dtype(query, key, value)
        query, key, value = (ops.cast(x, dtype) for x in (query, key, value))
        scale = self._inverse_sqrt_key_dim
        weights = ops.einsum("bthd,bshd->bhts", query * scale, key)
        if mask is not None:
            weights = ops.where(mask, weights, -1e30)
        weights = ops.softmax(weights, axis=-1)
        if mask is not None:
            weights = ops.where(mask, weights, 0.0)
        weights = self._dropout_layer(weights, training=call.training)
        return ops.einsum("bhts,bshd->bthd", weights, value)

    def _mask(self, length, keys, start, causal):
        """The mask by position, `(1 or batch, 1, length, keys)`, or `None`."""
        if not causal and self._sliding_window is None:
            return None
        steps = ops.arange(length, dtype="int32")[None, :, None]
        if start is not None:
            steps = steps + start[:, None, None]
        distance = steps - ops.arange(keys, dtype="int32")
        seen = distance >= 0 if causal else ops.ones_like(distance, "bool")
        if self._sliding_window is not None:
            near = ops.abs(distance) < self._sliding_window
            seen = ops.logical_and(seen, near)
        return seen[:, None]


def _by_distance(query, key, value):
    """Inputs whose products are `q·k − ‖k‖²/2`; `−‖q‖²/2` is the same for all keys."""
    dtype = accumulator_dtype(query, key, value)
    query, key, value = (ops.cast(x, dtype) for x in (query, key, value))
    square = ops.sum(ops.square(key), axis=-1, keepdims=True)
    query = ops.concatenate([query, ops.ones_like(query[..., :1])], axis=-1)
    return query, ops.concatenate([key, -square / 2], axis=-1), value


def _widen(x, width):
    """`(batch, length, heads, dim)`, padded with zeros to a width."""
    missing = width - x.shape[-1]
    return pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x


def _where_any(mask, heads):
    """`heads`, zero for queries that see no key."""
    if mask is None:
        return heads
    seen = ops.transpose(ops.any(mask, axis=-1, keepdims=True), (0, 2, 1, 3))
    return ops.where(seen, heads, ops.zeros_like(heads))


def cache_spec(batch_size, max_length, *sizes_and_dtype):
    """`state_spec` of `max_length` positions; outputs beyond them are NaN.

    Args:
        batch_size, max_length, *sizes_and_dtype: As of `recent_keys_spec`.
    """
    check_positive_int("max_length", max_length)
    return recent_keys_spec(batch_size, max_length, *sizes_and_dtype)


def extend_cache(cache, key, value, key_mask):
    """Writes the next positions to the cache.

    Args:
        cache: From `cache_spec` or an earlier call.
        key: `(batch, length, heads, key_dim)`.
        value: `(batch, length, heads, value_dim)`.
        key_mask: Boolean `(batch, length)`, with the positions of a row that exist at
            its beginning, or `None` for all.

    Returns:
        `(cache, key, value, mask, start)`: the new cache; all its keys and values, and
        the mask in the cache's dtype; and the position of each row's first new key,
        `(batch,)`.
    """
    start, lengths = cache["position"], row_lengths(key_mask)
    if key_mask is None:
        key_mask = ops.ones(shape_of(key)[:2], "bool")
    read = shape_of(key)[1] if lengths is None else lengths
    caches = [cache[name] for name in RECENT]
    segment = (
        ops.cast(new, old.dtype)
        for new, old in zip((key, value, key_mask), caches, strict=True)
    )
    written = write_positions(caches, list(segment), start, lengths)
    extended = {**dict(zip(RECENT, written, strict=True)), "position": start + read}
    keys, values = (ops.cast(extended[name], key.dtype) for name in ("key", "value"))
    return extended, keys, values, extended["mask"], start
