"""RelativePositionXL: attention with relative positions and a segment memory."""

import dataclasses

import keras
from keras import ops

from keras_efficient_attn.layers.arguments import (
    KeepsArguments,
    serialize_shared,
)
from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.layers.keras_internals import replace_child
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_int,
    check_positive_int,
    check_rate,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.positions import distance_sinusoids
from keras_efficient_attn.ops.common.random import dropout_seed
from keras_efficient_attn.ops.common.state import keep_last
from keras_efficient_attn.ops.relative_attention.api import relative_attention

# Longest wavelength of the sinusoids of distances, over 2π.
MAX_WAVELENGTH = 10_000.0
OWN_BIASES = ("own", "shared")


@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class PositionBiases(KeepsArguments, keras.layers.Layer):
    """The two vectors per head that `RelativePositionXL` adds to all queries.

    To share it, pass one object to several layers as `biases`.

    Args:
        num_heads: Number of attention heads.
        key_dim: Width of a head.
        **kwargs: Arguments of `keras.layers.Layer`.

    Example:

    >>> from keras_efficient_attn import PositionBiases, RelativePositionXL
    >>> biases = PositionBiases(num_heads=2, key_dim=8)
    >>> layers = [
    ...     RelativePositionXL(num_heads=2, key_dim=8, biases=biases) for _ in range(3)
    ... ]
    """

    def __init__(self, num_heads, key_dim, **kwargs):
        super().__init__(**kwargs)
        check_positive_int("num_heads", num_heads)
        check_positive_int("key_dim", key_dim)
        self.keep(locals())

    def build(self, input_shape=None):
        for name in ("content_bias", "position_bias"):
            weight = self.add_weight(
                name=name,
                shape=(self.num_heads, self.key_dim),
                initializer=keras.initializers.RandomNormal(stddev=0.02),
                autocast=False,
            )
            setattr(self, name, weight)


@register_attention("xl")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class RelativePositionXL(EfficientAttention):
    """Softmax attention of Transformer-XL: relative positions and a segment memory.

    ```
    w[i, j] = exp(((q[i] + u)·k[j] + (q[i] + v)·(W_R r[i − j])) / √key_dim)
    head[i] = Σ_j w[i, j] value[j] / Σ_j w[i, j]
    ```

    with learned vectors `u` and `v` per head, and sinusoids `r` of the distance.
    Without `use_causal_mask`, distances to later keys are negative and have their own
    sinusoids.

    The state is the **memory**: the layer's last inputs, unchanged, from which keys and
    values are projected again. No gradient flows into it. `max_length` of
    `get_initial_state` is the length of the memory; it defaults to `memory_length`.
    With `same_length` it is also the number of positions that every query sees in calls
    with that state. A query sees the earlier part of its segment and the memory; empty
    memory slots and masked positions are not seen. Time is proportional to `length ·
    (memory_length + length)`; the matrix of weights exists for a few queries at a time.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or
            name: `num_heads`, `key_dim`, `value_dim`, `dropout` (on the normalised
            weights), `use_bias`, ….
        memory_length: Positions before a segment that the state holds, 0 or more.
            Defaults to 128.
        clamp_length: Larger distances are clamped to it, for memories longer than in
            training. Defaults to `None`: no clamping.
        same_length: Whether every query sees exactly the `memory_length` positions up
            to and including itself, as in the authors' code (and, if not causal, as
            many from itself on), instead of all positions. Also applies without a
            state. Needs a `memory_length` of 1 or more. Defaults to `False`.
        biases: Source of `u` and `v`: `"own"` (the default); `"shared"`: in a
            `TransformerStack`, one pair for all layers with this option, as in the
            paper; or a `PositionBiases` to use.
        position_dropout: Rate of dropout on the sinusoids of relative positions.
            Defaults to 0.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`.

    Attributes:
        input_norm: Optional function that the layer applies to its inputs and to the
            memory, with the current weights. A `TransformerBlock` sets its norm here,
            and calls the layer with inputs that are not normalised.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`; with
        `state`, `key` must be `value`.

    Returns:
        As `EfficientAttention`: `(batch, query_length, output_dim)`, with the scores or
        the new state on request.

    Raises:
        ValueError: For an unsupported value of an argument above, or a state of another
            batch size or width.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import RelativePositionXL
    >>> layer = RelativePositionXL(num_heads=4, key_dim=16, memory_length=64)
    >>> text = keras.random.normal((2, 96, 32))
    >>> layer.build(text.shape, text.shape)
    >>> state = layer.get_initial_state(batch_size=2)
    >>> for segment in keras.ops.split(text, 3, axis=1):
    ...     output, state = layer(
    ...         segment, segment, use_causal_mask=True, state=state
    ...     )
    >>> state["memory"].shape
    (2, 64, 32)

    Reference:
        - [Dai et al., 2019](https://arxiv.org/abs/1901.02860)
    """

    input_norm = None
    _takes_any_state_length = True
    takes_documents = True
    remembers_inputs = True

    def __init__(
        self,
        *args,
        memory_length: int = 128,
        clamp_length: int | None = None,
        same_length: bool = False,
        biases="own",
        position_dropout: float = 0.0,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.keep(locals(), omit=("biases", "position_dropout"))
        check_bool("same_length", same_length)
        check_int("memory_length", memory_length, int(same_length))
        check_int("clamp_length", clamp_length, 1, optional=True)
        check_rate("position_dropout", position_dropout)
        if isinstance(biases, PositionBiases):
            self._check_biases(biases)
        elif biases not in OWN_BIASES:
            raise ValueError(
                f"`biases` must be one of {', '.join(OWN_BIASES)}, or a "
                f"`PositionBiases`. Received: biases={biases!r}"
            )
        self._source_of_biases = biases if biases in OWN_BIASES else "given"
        if self._source_of_biases != "given":
            biases = PositionBiases(
                self._num_heads, self._key_dim, dtype=self.dtype_policy, name="biases"
            )
        self.biases = biases
        self._position_dropout = keras.layers.Dropout(
            position_dropout,
            seed=self.seed,
            dtype=self.state_dtype,
            name="position_dropout",
        )

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        self._memory_dim = value_shape[-1]
        if not self.biases.built:
            self.biases.build()
        waves = query_shape[-1] + query_shape[-1] % 2
        self._position = self.add_weight(
            name="position",
            shape=(waves, self._num_heads, self._key_dim),
            initializer=self._new_kernel_initializer(),
        )

    @property
    def state_grows(self):
        # Only a memory as long as the context reproduces one call on the context; with
        # `same_length`, the layer's own memory does.
        return not self.same_length

    @property
    def _default_max_length(self):
        return self.memory_length

    @property
    def shares_with_blocks(self):
        return self._source_of_biases == "shared"

    def share_weights_with(self, other):
        """Shares another layer's `biases`.

        Args:
            other: A `RelativePositionXL` with as many heads of the same `key_dim`. This
                layer must not be built yet.

        Raises:
            ValueError: If this layer is built, or the two differ.
        """
        if self.built:
            raise ValueError(
                "`share_weights_with()` must be called before the layer is built. "
                "Received: built=True"
            )
        self._check_biases(other.biases)
        # An assignment would leave the layer's own among those that Keras quantises.
        replace_child(self, self.biases, other.biases)
        self.shares_unsaved = True

    def _check_biases(self, biases):
        sizes = biases.num_heads, biases.key_dim
        if sizes != (self._num_heads, self._key_dim):
            raise ValueError(
                f"`biases` must have the layer's num_heads={self._num_heads} and "
                f"key_dim={self._key_dim}. Received: num_heads={sizes[0]}, "
                f"key_dim={sizes[1]}"
            )

    def state_spec(self, batch_size, max_length):
        check_int("max_length", max_length, int(self.same_length))
        if not self.built:
            raise ValueError(
                "`get_initial_state()` needs a built layer, because the memory has the "
                "width of the layer's inputs. Received: built=False"
            )
        rows = (batch_size, max_length)
        return {
            "memory": ((*rows, self._memory_dim), self.state_dtype),
            "mask": (rows, self.state_dtype),
        }

    def operations(self, length, causal):
        heads, dim = self._num_heads, self._key_dim
        window = length
        if self.same_length:
            window = min(self.memory_length, length)
        per_pair = 2 * heads * (2 * dim + self._value_dim)
        distances = window if causal else 2 * window - 1
        positions = 2 * self._position.shape[0] * heads * dim * distances
        return positions + per_pair * count_pairs(window, length, causal)

    def attend(self, query, key, value, call):
        offset = call.options.get("offset", 0)
        memory_length = call.options.get("memory_length", self.memory_length)
        dtype = accumulator_dtype(query, key, value)
        dropout = None
        if call.training and self._dropout > 0.0:
            generator = self._dropout_layer.seed_generator
            dropout = self._dropout, dropout_seed(generator, dtype)
        length, keys = shape_of(query)[1], shape_of(key)[1]
        later = 0 if call.causal else keys - offset - 1
        documents = call.options.get("documents")
        if call.documents is not None and documents is None:
            documents = (call.documents.number,) * 2
        heads = relative_attention(
            *(ops.cast(t, dtype) for t in (query, key, value)),
            self._position_keys(offset + length, later, dtype, call.training),
            content_bias=ops.convert_to_tensor(self.biases.content_bias),
            position_bias=ops.convert_to_tensor(self.biases.position_bias),
            offset=offset,
            window=memory_length if self.same_length else None,
            causal=call.causal,
            key_mask=call.key_mask,
            documents=documents,
            dropout=dropout,
        )
        return heads, call.options.get("next_state")

    def _prepare_inputs(self, query, value, key, call):
        if call.state is None:
            return *self._normalize_inputs(query, value, key), call

        memory, seen = call.state["memory"], call.state["mask"]
        lengths = call.lengths
        length, memory_length = shape_of(query)[1], memory.shape[1]
        mask = ops.ones(shape_of(value)[:2], seen.dtype)
        if call.key_mask is not None:
            mask = ops.cast(call.key_mask, seen.dtype)
        kept = ops.concatenate([seen, mask], axis=1)
        extended = ops.concatenate([memory, ops.cast(value, memory.dtype)], axis=1)
        next_memory = ops.stop_gradient(keep_last(extended, length, lengths))
        next_mask = kept
        numbers = None
        if call.documents is not None:
            number = call.documents.number
            # The memory is the part of document 1 that was read before.
            before = ops.ones_like(seen, "int32")
            numbers = number, ops.concatenate([before, number], axis=1)
            # The next segment may go on with a document that was masked so far.
            last = ops.max(number, axis=1, keepdims=True)
            next_mask = ops.where(numbers[1] == last, kept, ops.zeros_like(kept))
        options = {
            "offset": memory_length,
            "memory_length": memory_length,
            "documents": numbers,
            "next_state": {
                "memory": next_memory,
                "mask": keep_last(next_mask, length, lengths),
            },
        }
        call = dataclasses.replace(call, key_mask=kept > 0, options=options)
        extended = ops.cast(extended, value.dtype)
        return *self._normalize_inputs(query, extended, extended), call

    def _normalize_inputs(self, query, value, key):
        """The inputs after `input_norm`, with identical tensors kept identical."""
        if self.input_norm is None:
            return query, value, key
        normed = {id(x): self.input_norm(x) for x in (query, value, key)}
        return tuple(normed[id(x)] for x in (query, value, key))

    def _check_call(self, query, value, key, call):
        if call.state is not None and key is not value:
            raise ValueError(
                "With `state`, leave out `key`, or pass `value` as `key`: the memory "
                f"holds one sequence. Received: key.shape={tuple(key.shape)}"
            )

    def get_config(self):
        biases = self._source_of_biases
        if biases == "given":
            biases = serialize_shared(self.biases)
        return {
            **super().get_config(),
            "biases": biases,
            "position_dropout": self._position_dropout.rate,
        }

    @classmethod
    def from_config(cls, config):
        biases = config.get("biases")
        if isinstance(biases, dict):
            biases = keras.saving.deserialize_keras_object(biases)
            config = {**config, "biases": biases}
        return super().from_config(config)

    def _position_keys(self, after, before, dtype, training):
        """Keys of distances, decreasing from `after - 1` to `-before`."""
        # Without causality, an empty sequence would give −1 distances: use 0.
        steps = ops.arange(after + before + 1, dtype="int32")[:-1]
        distances = after - 1 - steps
        if self.clamp_length is not None:
            distances = ops.clip(distances, -self.clamp_length, self.clamp_length)
        dim = self._position.shape[0]
        waves = distance_sinusoids(distances, dim, MAX_WAVELENGTH, dtype)
        waves = self._position_dropout(waves, training=training)
        return ops.einsum("md,dhk->mhk", waves, ops.cast(self._position, dtype))
