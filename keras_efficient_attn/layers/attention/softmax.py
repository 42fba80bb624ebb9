"""Softmax attention with a key/value cache, to stand among streaming layers."""

import keras
from keras import ops

from keras_efficient_attn.layers.attention.cache import empty_cache, extend_cache
from keras_efficient_attn.ops.common.checks import check_rotary_wavelength
from keras_efficient_attn.ops.common.rotary import rotary_embedding


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class SoftmaxAttention(keras.layers.MultiHeadAttention):
    """`MultiHeadAttention` with the state of this package's layers.

    The state is a cache of keys and values, of the length that `initial_state` is
    given: unlike those of the efficient layers it grows with the context, and a
    token costs time in proportion.

    Args:
        *args, **kwargs: Those of `keras.layers.MultiHeadAttention`.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000. Defaults to `None`: no positions.

    Call arguments:
        As `keras.layers.MultiHeadAttention`, which overwrites an explicit `query_mask`;
        here it counts. What comes out at masked queries means nothing.
        state: Optional, from `initial_state` or the previous segment's call. Needs
            `use_causal_mask=True`, and excludes masks and scores.

    Returns:
        As `keras.layers.MultiHeadAttention`; `(output, state)` with `state`.

    Raises:
        ValueError: For a `rotary_wavelength` that is not positive or with an odd
            `key_dim`, or a call with `state` and what that excludes.

    Example:

    >>> layer = SoftmaxAttention(num_heads=2, key_dim=8)
    >>> x = keras.random.normal((1, 5, 16))
    >>> layer.build(x.shape, x.shape)
    >>> state = layer.initial_state(batch_size=1, max_length=100)
    >>> y, state = layer(x, x, use_causal_mask=True, state=state)
    """

    # Whether `initial_state` takes the number of positions to hold.
    caches_keys = True

    def __init__(self, *args, rotary_wavelength=None, **kwargs):
        # autocast=False: the projections cast their inputs; a state stays as it is.
        super().__init__(*args, autocast=False, **kwargs)
        self.rotary_wavelength = rotary_wavelength
        check_rotary_wavelength(rotary_wavelength, self._key_dim)

    def initial_state(self, batch_size, max_length):
        """The empty cache.

        Args:
            batch_size: Rows in the batch.
            max_length: Positions that the cache can hold; outputs beyond are NaN.

        Returns:
            Dict of `key` and `value`, `(batch, max_length, heads, key_dim)` and
            `value_dim`, and `position`, the number of positions read, `(batch,)`.
        """
        tails = {
            "key": (self._num_heads, self._key_dim),
            "value": (self._num_heads, self._value_dim),
        }
        return empty_cache(batch_size, max_length, tails, self.compute_dtype)

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
    ):
        key = value if key is None else key
        masks = (query_mask, value_mask, key_mask, attention_mask)
        unmasked = all(mask is None for mask in masks)
        if state is not None:
            if not (use_causal_mask and unmasked) or return_attention_scores:
                raise ValueError(
                    "`state` needs `use_causal_mask=True`, and excludes masks and "
                    f"scores. Received: use_causal_mask={use_causal_mask}, masks "
                    f"given: {not unmasked}, "
                    f"return_attention_scores={return_attention_scores}"
                )
            mask, causal_kernel = None, False
        else:
            # Without another mask, the backend's causal kernel forms no matrix.
            causal_kernel = (
                use_causal_mask and unmasked and self._sliding_window is None
            )
            mask = self._compute_attention_mask(
                query,
                value,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                use_causal_mask=use_causal_mask and not causal_kernel,
            )
        gate = self._gate_dense(query) if self._use_gate else None
        position = None if state is None else state["position"]
        query = self._rotate(self._query_dense(query), position)
        key = self._rotate(self._key_dense(key), position)
        value = self._value_dense(value)
        if state is not None:
            key, value, mask, state = self._extend(query, key, value, state)
        heads, scores = self._compute_attention(
            query,
            key,
            value,
            attention_mask=mask,
            training=training,
            return_attention_scores=return_attention_scores,
            use_causal_mask=causal_kernel,
        )
        output = self._output_dense(heads if gate is None else heads * gate)
        if state is not None:
            return output, state
        return (output, scores) if return_attention_scores else output

    def _extend(self, query, key, value, state):
        """All keys and values so far, which of them queries see, and the state."""
        state, start = extend_cache(state, {"key": key, "value": value})
        length, capacity = ops.shape(query)[1], ops.shape(state["key"])[1]
        steps = ops.arange(length, dtype="int32")[:, None] + start
        distance = steps - ops.arange(capacity, dtype="int32")
        mask = distance >= 0
        if self._sliding_window is not None:
            mask = ops.logical_and(mask, distance < self._sliding_window)
        return state["key"], state["value"], mask[None], state

    def _rotate(self, x, position):
        if self.rotary_wavelength is None:
            return x
        steps = ops.arange(ops.shape(x)[1], dtype="int32")[None]
        if position is not None:
            steps = steps + position[:, None]
        # Half precision cannot tell far positions apart.
        wide = ops.cast(x, "float64" if self.compute_dtype == "float64" else "float32")
        return ops.cast(rotary_embedding(wide, steps, self.rotary_wavelength), x.dtype)

    def compute_output_spec(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        state=None,
    ):
        shape = self.compute_output_shape(
            query.shape, value.shape, None if key is None else key.shape
        )
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if state is not None:
            return output, state
        if return_attention_scores:
            shape = (query.shape[0], self._num_heads, query.shape[1], value.shape[1])
            return output, keras.KerasTensor(shape, dtype=self.compute_dtype)
        return output

    def get_config(self):
        return {**super().get_config(), "rotary_wavelength": self.rotary_wavelength}
