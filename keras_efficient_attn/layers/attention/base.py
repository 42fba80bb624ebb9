"""The base of all attention layers of this package."""

import keras
from keras import ops

from keras_efficient_attn.ops.common.numerics import accumulator_dtype


class EfficientAttention(keras.layers.MultiHeadAttention):
    """Base class: a `MultiHeadAttention` that never forms the attention matrix.

    Constructor, projections, weight names and call are those of
    [`keras.layers.MultiHeadAttention`](https://keras.io/api/layers/attention_layers/multi_head_attention/);
    a subclass adds its own keyword arguments and computes the heads' outputs
    in `attend`. This class adds:

    - **Factored masks.** A query mask `(batch, query_length)`, a key mask `(batch,
      key_length)` and a causal flag instead of a `(batch, query_length,
      key_length)` tensor. Keras' automatic masks and the explicit `query_mask`,
      `key_mask` and `value_mask` are honoured. What stands at masked positions is
      never read: it may be NaN, and its gradient is zero.
    - **Scores on request**, the dense matrix with `heads = scores @ value`, before
      dropout.
    - **State**, for layers that stream: see `initial_state`.
    - Rows that see no key, or that the query mask hides, give zero heads (so the
      output is the output projection's bias).

    Args:
        *args, **kwargs: Those of `keras.layers.MultiHeadAttention`. `attention_axes`
            other than the sequence axis 1, `sliding_window` and
            `flash_attention=True` are refused. `dropout` acts on the attention
            weights where the layer has them, otherwise on the concatenated heads.
        num_key_value_heads: Number of heads of keys and values, a divisor of
            `num_heads`: each serves `num_heads / num_key_value_heads` heads of
            queries, one after the other (grouped-query attention,
            [Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)). Defaults to
            `None`: as many as `num_heads`.

    Call arguments:
        query: `(batch, query_length, query_dim)`.
        value: `(batch, key_length, value_dim)`.
        key: Optional `(batch, key_length, key_dim)`; defaults to `value`.
        query_mask: Optional boolean `(batch, query_length)`.
        value_mask: Optional boolean `(batch, key_length)`.
        key_mask: Optional boolean `(batch, key_length)`.
        attention_mask: Optional mask that is the same for all queries: of shape
            `(batch, 1, key_length)` or `(batch, 1, 1, key_length)`.
        return_attention_scores: Whether to return `(output, scores)`; forms the
            `(batch, heads, query_length, key_length)` matrix.
        training: Whether to apply dropout and update statistics.
        use_causal_mask: Whether query `t` sees keys `0..t` only.
        state: Optional state, from `initial_state` or the previous segment's call.
            Needs `use_causal_mask=True`.

    Returns:
        `output` `(batch, query_length, output_dim)`; `(output, scores)` with
        `return_attention_scores`; `(output, state)` with `state`.

    Raises:
        ValueError: For arguments named above that cannot be honoured.
    """

    def __init__(self, *args, num_key_value_heads=None, **kwargs):
        # autocast=False: inputs reach the projections as they came (those cast
        # them), and a state keeps its float32 under a mixed policy.
        super().__init__(*args, autocast=False, **kwargs)
        self.num_key_value_heads = num_key_value_heads
        shared = num_key_value_heads
        if shared is not None and (
            not isinstance(shared, int) or shared < 1 or self._num_heads % shared
        ):
            raise ValueError(
                "`num_key_value_heads` must be a positive integer that divides "
                f"`num_heads`, or None. Received: num_key_value_heads={shared!r}, "
                f"num_heads={self._num_heads}"
            )
        # The ninth of Keras' positional arguments.
        flash_attention = kwargs.get("flash_attention") or args[8:9] == (True,)
        if self._attention_axes not in (None, (1,), [1]):
            raise ValueError(
                f"{type(self).__name__} attends along axis 1 only. Received: "
                f"attention_axes={self._attention_axes}"
            )
        if self._sliding_window is not None:
            raise ValueError(
                f"{type(self).__name__} has no `sliding_window`; layers that combine "
                "with a window have an argument `window`. Received: "
                f"sliding_window={self._sliding_window}"
            )
        if flash_attention:
            raise ValueError(
                f"{type(self).__name__} is not softmax attention and cannot use "
                "flash attention. Received: flash_attention=True"
            )
        self._flash_attention = False

    def attend(self, query, key, value, query_mask, key_mask, causal, state, training):
        """Attends over heads. The one method that a subclass has to have.

        Args:
            query: `(batch, query_length, heads, key_dim)`, projected.
            key: `(batch, key_length, heads, key_dim)`, projected.
            value: `(batch, key_length, heads, value_dim)`, projected.
            query_mask: Boolean `(batch, query_length)` or `None`.
            key_mask: Boolean `(batch, key_length)` or `None`.
            causal: Whether query `t` sees keys `0..t` only.
            state: Dict of tensors, or `None`.
            training: Boolean.

        Returns:
            `(heads, state)`: `(batch, query_length, heads, value_dim)`, linear in
            `value`, and the new state (`None` without one).
        """
        raise NotImplementedError

    def attend_at(self, position, query, key, value, key_mask):
        """Attends over heads, causally, from a few positions to a whole sequence.

        For a cache of keys and values, some of which are yet to come.

        Args:
            position: Of the first query among the keys, an integer or a scalar.
            query: `(batch, query_length, heads, key_dim)`, projected.
            key, value, key_mask: As for `attend`.

        Returns:
            `(batch, query_length, heads, value_dim)`: what `attend` gives for these
            queries.
        """
        # The queries of other positions are zeros, and what they get is dropped.
        at = [0, position, 0, 0]
        batch, length, heads, _ = ops.shape(query)
        query = ops.slice_update(ops.zeros_like(key), at, ops.cast(query, key.dtype))
        output, _ = self.attend(query, key, value, None, key_mask, True, None, False)
        return ops.slice(output, at, [batch, length, heads, output.shape[-1]])

    @property
    def can_calibrate(self):
        """Whether `calibrate(data)` fits the layer to data without training."""
        return False

    @property
    def calibrates_beyond_window(self):
        """Whether `calibrate` fits to the keys beyond the `window`."""
        return False

    @property
    def state_names(self):
        """Names of the tensors of the state; empty for a layer that does not stream."""
        return ()

    def initial_state(self, batch_size):
        """The state before the first position, for streaming a causal sequence.

        ```python
        state = layer.initial_state(batch_size)
        for segment in segments:  # of any length, down to a single position
            output, state = layer(
                segment, segment, use_causal_mask=True, state=state
            )
        ```

        gives the same outputs as one call on the whole sequence.

        Args:
            batch_size: Rows in the batch.

        Returns:
            Flat dict of tensors, batch first; floating-point ones are float32 or
            wider whatever the compute dtype.
        """
        raise ValueError(f"{type(self).__name__} does not stream.")

    def build(self, query_shape, value_shape, key_shape=None):
        for name, shape in (
            ("query", query_shape),
            ("value", value_shape),
            ("key", key_shape or value_shape),
        ):
            if len(shape) != 3:
                raise ValueError(
                    f"`{name}` must have the shape (batch, length, dim). Received: "
                    f"{name}.shape={tuple(shape)}"
                )
        self._build_projections(query_shape, value_shape, key_shape)

    def _build_projections(self, query_shape, value_shape, key_shape):
        if self.num_key_value_heads is None:
            super().build(query_shape, value_shape, key_shape)
            return
        # As Keras builds them, in its order, with fewer heads of keys and values.
        groups = self.num_key_value_heads
        key_shape = value_shape if key_shape is None else key_shape
        self._query_dense = self._projection_to(
            "query", query_shape, self._num_heads, self._key_dim
        )
        self._key_dense = self._projection_to("key", key_shape, groups, self._key_dim)
        if self._use_gate:
            self._gate_dense = self._projection_to(
                "gate", query_shape, self._num_heads, self._value_dim, "sigmoid"
            )
        self._value_dense = self._projection_to(
            "value", value_shape, groups, self._value_dim
        )
        self._build_attention(4)
        self._output_dense = self._make_output_dense(
            query_shape, self._get_common_kwargs_for_sublayer(), "attention_output"
        )
        self._output_dense.build((*query_shape[:-1], self._num_heads, self._value_dim))

    def _projection_to(self, name, shape, heads, dim, activation=None):
        projection = keras.layers.EinsumDense(
            "abc,cde->abde",
            output_shape=(None, heads, dim),
            bias_axes="de" if self._use_bias else None,
            activation=activation,
            name=name,
            **self._get_common_kwargs_for_sublayer(),
        )
        projection.build(shape)
        return projection

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
        return self._call(
            query,
            value,
            key,
            (query_mask, value_mask, key_mask, attention_mask),
            return_attention_scores,
            training,
            use_causal_mask,
            state,
        )

    def _call(
        self,
        query,
        value,
        key,
        masks,
        return_attention_scores,
        training,
        use_causal_mask,
        state,
        **options,
    ):
        """The call; a subclass with further call arguments has them in `attend`."""
        key = value if key is None else key
        query_mask, value_mask, key_mask, attention_mask = masks
        self._check_call(
            query, value, key, masks, use_causal_mask, return_attention_scores, state
        )
        query_mask = None if query_mask is None else ops.cast(query_mask, "bool")
        key_mask = self._merged_key_mask(key_mask, value_mask, attention_mask, key)
        # Hidden positions are emptied before the projections: a NaN there would
        # otherwise reach the kernels' gradients as 0 · NaN.
        gate_input = query = _emptied(query, query_mask)
        value = _emptied(value, key_mask)
        key = _emptied(key, key_mask)

        query, key = self._query_and_key(query, key, query_mask, key_mask)
        key = self._for_query_heads(key)
        value = self._for_query_heads(self._value_dense(value))
        arguments = (query_mask, key_mask, use_causal_mask)
        scores = None
        if return_attention_scores:
            # First: attending may learn, and then the weights are no longer those
            # that made the output.
            scores = self._scores(query, key, value, arguments, bool(training), options)
        heads, new_state = self.attend(
            query, key, value, *arguments, state, bool(training), **options
        )
        output = self._project(heads, gate_input, query_mask, training)
        if state is not None:
            return output, new_state
        return output if scores is None else (output, scores)

    def _query_and_key(self, query, key, query_mask, key_mask):
        """Both projected, `(batch, length, heads, key_dim)`; keys have their heads."""
        return self._projected_query(query), self._projected_key(key)

    def _projected_query(self, query):
        return self._query_dense(query)

    def _projected_key(self, key):
        return self._key_dense(key)

    def _for_query_heads(self, x):
        """Keys or values, repeated for the heads of queries that share them."""
        if self.num_key_value_heads is None:
            return x
        return ops.repeat(x, self._num_heads // self.num_key_value_heads, axis=2)

    def _project(self, heads, gate_input, query_mask, training):
        heads = ops.cast(heads, self.compute_dtype)
        if query_mask is not None:
            kept = query_mask[..., None, None]
            heads = ops.where(kept, heads, ops.zeros_like(heads))
        if self._use_gate:
            heads = heads * self._gate_dense(gate_input)
        return self._output_dense(heads)

    def _scores(self, query, key, value, arguments, training, options):
        """The matrix that `attend` will apply to the values: its image of one-hots."""
        query_mask, _, _ = arguments
        batch, length = ops.shape(key)[:2]
        one_hot = ops.eye(length, dtype=accumulator_dtype(value))[None, :, None, :]
        one_hot = ops.broadcast_to(one_hot, (batch, length, self._num_heads, length))
        scores, _ = self.attend(query, key, one_hot, *arguments, None, False, **options)
        if query_mask is not None:
            kept = query_mask[..., None, None]
            scores = ops.where(kept, scores, ops.zeros_like(scores))
        return ops.cast(ops.transpose(scores, (0, 2, 1, 3)), self.compute_dtype)

    def _merged_key_mask(self, key_mask, value_mask, attention_mask, key):
        masks = [mask for mask in (key_mask, value_mask) if mask is not None]
        if attention_mask is not None:
            masks.append(_key_mask_of(attention_mask, key))
        merged = None
        for mask in masks:
            mask = ops.cast(mask, "bool")
            merged = mask if merged is None else ops.logical_and(merged, mask)
        return merged

    def _check_call(
        self, query, value, key, masks, causal, return_attention_scores, state
    ):
        """Refuses what cannot be computed, in eager and in symbolic calls alike."""
        names = ("query_mask", "value_mask", "key_mask")
        for name, mask, of in zip(names, masks, (query, value, key), strict=False):
            if mask is not None and not _may_agree(mask.shape, of.shape[:2]):
                raise ValueError(
                    f"`{name}` must have the shape (batch, length) = {of.shape[:2]}. "
                    f"Received: {name}.shape={tuple(mask.shape)}"
                )
        if masks[3] is not None:
            self._check_attention_mask(tuple(masks[3].shape), key.shape)
        if state is not None:
            self._check_state(query, value, state, causal, return_attention_scores)

    def _check_attention_mask(self, shape, key_shape):
        # (T, S), (B, T, S) or (B, H, T, S): all but the batch and S must be 1.
        if len(shape) in (2, 3, 4) and set(shape[-2:-1] + shape[1:-2]) == {1}:
            of_keys = (*(shape[:1] if len(shape) > 2 else (1,)), shape[-1])
            shared = (1, key_shape[1])
            if any(_may_agree(of_keys, of) for of in (key_shape[:2], shared)):
                return
            raise ValueError(
                "`attention_mask` must have the keys' batch size, or 1, and their "
                f"length. Received: attention_mask.shape={shape}, "
                f"key.shape={tuple(key_shape)}"
            )
        raise ValueError(
            f"{type(self).__name__} never forms the matrix of queries by keys, "
            "and so cannot apply an `attention_mask` that differs between "
            "queries. Pass a mask over keys as `key_mask` (batch, key_length), "
            "or as `attention_mask` of shape (batch, 1, key_length); a mask over "
            "queries as `query_mask` (batch, query_length); and "
            "`use_causal_mask=True` for causality. Received: "
            f"attention_mask.shape={shape}"
        )

    def _check_state(self, query, value, state, causal, return_attention_scores):
        if not causal:
            raise ValueError(
                "`state` holds the past, and needs `use_causal_mask=True`. Received: "
                "use_causal_mask=False"
            )
        if return_attention_scores:
            raise ValueError(
                "`return_attention_scores=True` and `state` exclude each other: the "
                "keys of earlier segments are not kept. Received both."
            )
        if not _may_agree(query.shape[1:2], value.shape[1:2]):
            raise ValueError(
                "With `state`, `query` and `value` must have the same length. "
                f"Received: query.shape={tuple(query.shape)}, "
                f"value.shape={tuple(value.shape)}"
            )
        if not isinstance(state, dict) or set(state) != set(self.state_names):
            received = sorted(state) if isinstance(state, dict) else type(state)
            raise ValueError(
                "`state` must be the dict that `initial_state` or the previous call "
                f"returned, with the keys {sorted(self.state_names)}. Received: "
                f"{received}"
            )
        for name, tensor in state.items():
            if not _may_agree(tensor.shape[:1], query.shape[:1]):
                raise ValueError(
                    "`state` must have the batch size of `query`. Received: "
                    f"state[{name!r}].shape={tuple(tensor.shape)}, "
                    f"query.shape={tuple(query.shape)}"
                )

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
        masks = (query_mask, value_mask, key_mask, attention_mask)
        self._check_call(
            query,
            value,
            value if key is None else key,
            masks,
            use_causal_mask,
            return_attention_scores,
            state,
        )
        output = keras.KerasTensor(
            self.compute_output_shape(
                query.shape, value.shape, None if key is None else key.shape
            ),
            dtype=self.compute_dtype,
        )
        if state is not None:
            return output, {
                name: keras.KerasTensor(tensor.shape, dtype=tensor.dtype)
                for name, tensor in state.items()
            }
        if return_attention_scores:
            shape = (query.shape[0], self._num_heads, query.shape[1], value.shape[1])
            return output, keras.KerasTensor(shape, dtype=self.compute_dtype)
        return output

    def set_weights(self, weights):
        """Sets all weights; or the projections alone, from a `MultiHeadAttention`.

        Args:
            weights: List of arrays: as many as `self.weights`, or those of a
                `keras.layers.MultiHeadAttention` with the same projections.
        """
        projections = [
            variable
            for layer in self._flatten_layers(include_self=False)
            if isinstance(layer, keras.layers.EinsumDense)
            for variable in layer.weights
        ]
        if len(weights) == len(self.weights) or len(weights) != len(projections):
            super().set_weights(weights)
            return
        for variable, weight in zip(projections, weights, strict=True):
            variable.assign(weight)

    def get_config(self):
        config = super().get_config()
        # Keras records the axes that it derives while building.
        config["attention_axes"] = None
        config["num_key_value_heads"] = self.num_key_value_heads
        quantized = {
            layer.path: layer.dtype_policy
            for layer in self._flatten_layers(include_self=False)
            if layer.quantization_mode is not None
        }
        if quantized:
            policies = keras.dtype_policies.DTypePolicyMap(
                default_policy=self.dtype_policy.name, policy_map=quantized
            )
            config["dtype"] = keras.dtype_policies.serialize(policies)
        return config


def _emptied(x, mask):
    """`x` with zeros where the `(batch, length)` mask is `False`."""
    if mask is None:
        return x
    return ops.where(mask[..., None], x, ops.zeros_like(x))


def _may_agree(first, second):
    """Whether two shapes are equal as far as they are known."""
    first, second = tuple(first), tuple(second)
    return len(first) == len(second) and all(
        a is None or b is None or a == b for a, b in zip(first, second, strict=True)
    )


def _key_mask_of(attention_mask, key):
    """The `(batch, key_length)` mask that a dense mask repeats for every query."""
    batch, length = ops.shape(key)[:2]
    rows = 1 if len(attention_mask.shape) == 2 else ops.shape(attention_mask)[0]
    mask = ops.reshape(ops.cast(attention_mask, "bool"), (rows, length))
    return ops.broadcast_to(mask, (batch, length))
