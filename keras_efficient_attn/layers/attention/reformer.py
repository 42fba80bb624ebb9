"""ReformerLSHAttention: attention within the buckets of a hash."""

import dataclasses
import math

import keras
import numpy as np
from keras import ops

from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.layers.attention.registry import register_attention
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_bool,
    check_positive_int,
    check_positive_number,
    is_int,
)
from keras_efficient_attn.ops.common.dense_softmax import count_pairs
from keras_efficient_attn.ops.common.numerics import (
    NORM_EPSILON,
    accumulator_dtype,
    wide_dtype,
)
from keras_efficient_attn.ops.lsh_attention.api import lsh_attention
from keras_efficient_attn.ops.lsh_attention.layout import (
    hash_buckets,
    num_rotation_rows,
)
from keras_efficient_attn.ops.lsh_attention.streaming import (
    dense_prefix_attention,
    lsh_attention_state_spec,
)
from keras_efficient_attn.ops.reversible.remembered import cache_for_backward

# Minimum number of rounds with rotations.
DEFAULT_MAX_HASHES = 8
LOCAL, PREFIX = "local_", "prefix_"


@register_attention("reformer")
@keras.saving.register_keras_serializable(package="keras_efficient_attn")
class ReformerLSHAttention(EfficientAttention):
    """Self-attention among positions that a hash puts into the same bucket.

    Queries and keys are the same vectors, the keys at unit length:

    ```
    key[s] = query[s] / √(‖query[s]‖² + key_epsilon · key_dim)
    bucket[t] = argmax([query[t] R; −query[t] R])
    w[t, s] = exp(query[t] · key[s] / √key_dim)   where t sees s in any round
    ```

    divided by the sum of the weights. Each of `num_hashes` rounds has its own rotations
    R. It sorts positions by bucket and cuts them into chunks of `bucket_size`. A
    position sees the positions of its bucket in its own chunk and the previous chunk. A
    key found in several rounds counts once: the output is exactly softmax attention
    over all keys found. A position sees itself only if it sees no other key. Work grows
    with length · `num_hashes` · `bucket_size`, and the sort with length · log(length).
    Short sequences take all pairs instead, where that is faster (see
    `ops.lsh_attention`), except with dropout.

    **Causality.** In the published algorithm chunks cross bucket boundaries, so a
    position's chunk depends on later positions, and a causal mask within chunks does
    not hide the future. With `use_causal_mask` each bucket therefore starts a new chunk
    (`aligned`), which is exactly causal and can stream. This takes up to `length +
    num_buckets · bucket_size` slots per round instead of `length`.

    **Streaming.** The state holds the last `2 · bucket_size` keys and values of each
    bucket. Its size does not depend on the context: `num_hashes · num_buckets · 2 ·
    bucket_size` rows per head. Long segments are processed a few positions at a time.
    Keys are counted in float32: a stream is exact until a bucket has had 2²⁴ keys, or
    `bucket_size / num_buckets` times as many if that is less, and for local heads until
    2²⁴ positions.

    **Weights** are those of `keras.layers.MultiHeadAttention` without its key
    projection: `key_dense` is `query_dense`. `set_weights` takes the weights of a
    `MultiHeadAttention` and ignores its key projection. The rotations are an
    additional, untrained weight.

    Args:
        *args: The arguments of `keras.layers.MultiHeadAttention`, by position or name:
            `num_heads`, `key_dim`, `value_dim`, `dropout` (on the attention weights, in
            the same places of all chunks), `use_bias`, ….
        bucket_size: Positions per chunk. Defaults to 64.
        num_hashes: Number of hash rounds. Defaults to 4.
        num_buckets: Even number of buckets, or a tuple of even factors of that number:
            hashing costs the sum of the factors. About `2 · length / bucket_size` is a
            good choice. Defaults to 32.
        max_hashes: Maximum number of rounds per call; rotations exist for this many.
            Defaults to the larger of 8 and `num_hashes`.
        aligned: Whether each bucket starts a new chunk. Defaults to `None`: only with
            `use_causal_mask`.
        across_buckets: Whether, in unaligned chunks, positions also see other buckets
            in their own and the previous chunk. Defaults to `False`: their own bucket
            only, the paper's formula.
        scale_logits: Whether logits are divided by `√key_dim`, as in the paper's text.
            The authors' code does not divide. Defaults to `True`.
        num_local_heads: Number of heads, counted from the last, that attend to the
            nearest positions instead: their own chunk of neighbours and the previous
            one. Defaults to 0.
        dense_length: Sequences of at most this many positions, padding included, use
            dense attention. Excludes streaming, where the length is unknown, and graphs
            traced for any length. Defaults to `None`: never.
        dense_prefix: Number of first positions that see all positions before them,
            whatever their buckets; for causal calls, and streaming. Their keys and
            values are in the state. Excludes `dense_length`, `num_local_heads` and
            `document_ids`. Defaults to `None`: none.
        key_epsilon: Added to the mean square of the keys. Defaults to 1e-3.
        **kwargs: Further arguments of `keras.layers.MultiHeadAttention`. `seed` also
            seeds the rotations.

    Call arguments:
        As `EfficientAttention`: `query`, `value`, `key`, masks, `training`,
        `use_causal_mask`, `return_attention_scores`, `state`, `document_ids`. Queries
        and keys are computed from `query`; `key`, or `value` without a `key`, must be
        the same tensor. Positions that `key_mask` hides are in a separate bucket and
        see nothing: their heads are zero.
        num_hashes: Optional number of rounds for this call, at most `max_hashes`.

    Returns:
        As `EfficientAttention`: `(batch, query_length, output_dim)`, with the scores or
        the new state on request.

    Raises:
        ValueError: If an argument is invalid; on a call if `key` is not `query`,
            `num_hashes` exceeds `max_hashes`, or `dense_length` is set and the length
            is unknown; without `use_causal_mask` if `dense_prefix` is set; with
            `state`, if `num_hashes` is given, `aligned` is `False` or `dense_length` is
            set.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ReformerLSHAttention
    >>> x = keras.random.normal((2, 1000, 64))
    >>> layer = ReformerLSHAttention(num_heads=4, key_dim=32)
    >>> y = layer(x, x, use_causal_mask=True)
    >>> y = layer(x, x, use_causal_mask=True, num_hashes=8)  # Nearer to all pairs.

    Reference:
        - [Kitaev et al., 2020](https://arxiv.org/abs/2001.04451)
    """

    def __init__(
        self,
        *args,
        bucket_size: int = 64,
        num_hashes: int = 4,
        num_buckets: int | tuple[int, ...] = 32,
        max_hashes: int | None = None,
        aligned: bool | None = None,
        across_buckets: bool = False,
        scale_logits: bool = True,
        num_local_heads: int = 0,
        dense_length: int | None = None,
        dense_prefix: int | None = None,
        key_epsilon: float = NORM_EPSILON,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        # A saved tuple is loaded as a list.
        if isinstance(num_buckets, list | tuple):
            num_buckets = tuple(num_buckets)
        self.keep(locals())
        self._check_arguments()
        factors = self.num_buckets
        self._factors = factors if isinstance(factors, tuple) else (factors,)
        self._hashed_heads = self._num_heads - num_local_heads
        self._scale = self._key_dim**-0.5 if scale_logits else 1.0
        # Keys have the operation's epsilon: larger vectors have a smaller one.
        self._enlarged = (NORM_EPSILON / key_epsilon) ** 0.5
        self._scale /= self._enlarged

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        # Keys share the queries' projection: remove theirs from the weights.
        self._tracker.untrack(self._key_dense)
        self._key_dense = self._query_dense
        self._rotations = self.add_weight(
            name="rotations",
            shape=(
                self._rounds_at_most,
                self._hashed_heads,
                self._key_dim,
                num_rotation_rows(self._factors),
            ),
            initializer=keras.initializers.RandomNormal(stddev=1.0, seed=self.seed),
            dtype=wide_dtype(self.variable_dtype),
            trainable=False,
        )

    def state_spec(self, batch_size, max_length):
        self._check_streams()
        spec = self._state_of_heads(batch_size, self._hashed_heads, self.num_hashes)
        if self.num_local_heads:
            local = self._state_of_heads(batch_size, self.num_local_heads, None)
            spec |= {LOCAL + name: entry for name, entry in local.items()}
        if self.dense_prefix is not None:
            for name, dim in (("query", self._key_dim), ("value", self._value_dim)):
                shape = (batch_size, self.dense_prefix, self._num_heads, dim)
                spec[PREFIX + name] = (shape, self.state_dtype)
            spec["position"] = ((batch_size,), "int32")
        return spec

    @classmethod
    def conversion_refusal(cls, options):
        return (
            "it has one projection for queries and keys, and would lose the trained "
            "projection of the keys."
        )

    @property
    def takes_documents(self):
        # Whether a document is dense would depend on the others of its row.
        return self.dense_length is None and self.dense_prefix is None

    @property
    def estimates_softmax(self):
        # Compute over all pairs of shared queries and keys.
        return self.num_local_heads == 0 and not self._use_gate

    def softmax_logits(self, query, key, positions, causal):
        key = key / np.linalg.norm(key, axis=-1, keepdims=True)
        if not self.scale_logits:
            key = key * self._key_dim**0.5
        logits = super().softmax_logits(query, key, positions, causal)
        # A position sees itself only if it sees no other key.
        seen = np.isfinite(logits)
        own = np.arange(key.shape[-2]) == positions[:, None]
        others = (seen & ~own).any(-1, keepdims=True)
        return np.where(own & others, -np.inf, logits)

    def operations(self, length, causal):
        dense = self.dense_length is not None and length <= self.dense_length
        pairs = count_pairs(length, length, causal)
        rounds, rotations = self.num_hashes, sum(self._factors) // 2
        if dense:
            rounds, rotations = 1, 0
        else:
            # Its own chunk, half of it if causal, and the previous chunk.
            chunks = length * (3 if causal else 4) * self.bucket_size // 2
            pairs = min(pairs, chunks)
        hashing = 2 * self._hashed_heads * self._key_dim * rotations * rounds * length
        per_pair = 2 * (self._key_dim + self._value_dim)
        in_rounds = self._hashed_heads * rounds + self.num_local_heads
        return hashing + in_rounds * per_pair * pairs

    def _state_of_heads(self, batch_size, heads, rounds):
        return lsh_attention_state_spec(
            batch_size,
            heads,
            rounds or 1,
            math.prod(self._factors) if rounds else 1,
            self.bucket_size,
            self._key_dim,
            self._value_dim,
            self.state_dtype,
        )

    def _call_options(self, inputs, state, options):
        options = dict(options)
        num_hashes = options.pop("num_hashes", None)
        super()._call_options(inputs, state, options)
        self._check_num_hashes(num_hashes, state)
        return {"num_hashes": num_hashes or self.num_hashes}

    def attend(self, query, key, value, call):
        if self._enlarged != 1.0:
            query = ops.cast(query, accumulator_dtype(query)) * self._enlarged
        if self.dense_prefix is not None:
            return self._attend_with_prefix(query, value, call)
        return self._attend(query, value, call)

    def _attend_with_prefix(self, query, value, call):
        """As `_attend`; the first positions see all before them."""
        size = self.dense_prefix
        if call.state is None:
            mask = None if call.key_mask is None else call.key_mask[:, :size]
            first = dataclasses.replace(call, key_mask=mask)
            heads = self._attend_dense(query[:, :size], value[:, :size], first)
            length = query.shape[1]
            if length is not None and length <= size:
                return heads, None
            rest, _ = self._attend(query, value, call)
            heads = ops.cast(heads, rest.dtype)
            return ops.concatenate([heads, rest[:, size:]], axis=1), None
        state = dict(call.state)
        position = state.pop("position")
        prefix = [state.pop(PREFIX + name) for name in ("query", "value")]
        heads, state = self._attend(
            query, value, dataclasses.replace(call, state=state)
        )
        dense, prefix = dense_prefix_attention(
            (query, value), prefix, position, call.lengths, self._scale
        )
        steps = position[:, None] + ops.arange(shape_of(query)[1], dtype="int32")
        within = (steps < size)[..., None, None]
        heads = ops.where(within, ops.cast(dense, heads.dtype), heads)
        return heads, {
            **state,
            **{PREFIX + n: x for n, x in zip(("query", "value"), prefix, strict=True)},
            "position": position + call.positions_read(query),
        }

    def _attend(self, query, value, call):
        if self.dense_length is not None:
            length = shape_of(query)[1]
            if not isinstance(length, int):
                raise ValueError(
                    "`dense_length` needs inputs of a fixed length: set it in "
                    f"`keras.Input`. Received: dense_length={self.dense_length}, "
                    f"query.shape={tuple(query.shape)}"
                )
            if length <= self.dense_length:
                return self._attend_dense(query, value, call), None
        if call.documents is not None:
            self._check_documents(query, call)
        rounds = call.options["num_hashes"]
        buckets = ops.cast(
            cache_for_backward(lambda: self._buckets(query, rounds)),
            "int32",
        )
        return self._attend_hashed(query, value, buckets, call)

    def _buckets(self, query, num_hashes):
        rotations = ops.convert_to_tensor(self._rotations)[:num_hashes]
        hashed = query[:, :, : self._hashed_heads]
        hashed = ops.cast(hashed, accumulator_dtype(hashed))
        buckets = hash_buckets(hashed, rotations, self._factors)
        # A reversible stack stores the hash buckets.
        small = math.prod(self._factors) <= 256
        return ops.cast(buckets, "uint8") if small else buckets

    def _attend_dense(self, query, value, call):
        """Attends within one chunk that holds all positions."""
        length = max(1, query.shape[1] or self.dense_prefix)
        heads, _ = lsh_attention(
            query,
            value,
            _one_bucket(query),
            num_buckets=1,
            chunk_size=length,
            causal=call.causal,
            key_mask=call.key_mask,
            scale=self._scale,
            dropout_mask=self._dropout_mask(query, 1, length, call.training),
        )
        return heads

    def _attend_hashed(self, query, value, buckets, call):
        state = call.state

        def attend(query, value, buckets, num_buckets, aligned, state):
            rounds = buckets.shape[2]
            return lsh_attention(
                query,
                value,
                buckets,
                num_buckets=num_buckets,
                chunk_size=self.bucket_size,
                causal=call.causal,
                aligned=aligned,
                across_buckets=self.across_buckets and not aligned,
                key_mask=call.key_mask,
                state=state,
                documents=call.documents,
                scale=self._scale,
                dropout_mask=self._dropout_mask(
                    query, rounds, self.bucket_size, call.training
                ),
            )

        names = ("cache", "count")

        def state_of(prefix):
            if state is None:
                return None
            return {name: state[prefix + name] for name in names}

        split = self._hashed_heads
        aligned = call.causal if self.aligned is None else self.aligned
        heads, new_state = attend(
            query[:, :, :split],
            value[:, :, :split],
            buckets,
            math.prod(self._factors),
            aligned,
            state_of(""),
        )
        if not self.num_local_heads:
            return heads, new_state
        # One aligned bucket gives chunks of neighbours.
        local = query[:, :, split:]
        local_heads, local_state = attend(
            local, value[:, :, split:], _one_bucket(local), 1, True, state_of(LOCAL)
        )
        heads = ops.concatenate([heads, local_heads], axis=2)
        if state is None:
            return heads, None
        return heads, {
            **new_state,
            **{LOCAL + name: local_state[name] for name in names},
        }

    def _dropout_mask(self, query, rounds, chunk_size, training):
        if not (training and self._dropout > 0.0):
            return None
        batch, _, heads, _ = shape_of(query)
        shape = (batch, heads, rounds, chunk_size, 2 * chunk_size)
        return self._dropout_layer(
            ops.ones(shape, accumulator_dtype(query)), training=True
        )

    def _project_inputs(self, query, key, value, call):
        # A position that only the query mask hides is a key.
        shared = self._query_dense(key)
        return shared, shared, self._value_dense(value), call

    def set_weights(self, weights):
        """Sets all weights; or the projections alone, from a `MultiHeadAttention`.

        Args:
            weights: List of arrays: as many as `self.weights`, or the weights of a
                `keras.layers.MultiHeadAttention` with the same projections, whose key
                projection is ignored.
        """
        own = [tuple(weight.shape) for weight in self.weights]
        count = len(self._query_dense.weights)
        shapes = [tuple(np.shape(weight)) for weight in weights]
        if len(own) - 1 + count == len(weights) and shapes != own:
            weights = weights[:count] + weights[2 * count :]
        super().set_weights(weights)

    @property
    def _rounds_at_most(self):
        return self.max_hashes or max(DEFAULT_MAX_HASHES, self.num_hashes)

    def _check_call(self, query, value, key, call):
        if self.dense_prefix is not None and not call.causal:
            raise ValueError(
                "`dense_prefix` needs a call with use_causal_mask=True. Received: "
                f"dense_prefix={self.dense_prefix}, use_causal_mask=False"
            )
        if call.state is not None:
            self._check_streams()
        lengths = query.shape[1], value.shape[1]
        if None not in lengths and len(set(lengths)) > 1:
            raise ValueError(
                "`query` and `value` must have the same length: queries and keys are "
                f"the same vectors. Received: query length {lengths[0]}, value length "
                f"{lengths[1]}"
            )
        if key is not query:
            raise ValueError(
                "Queries and keys are the same vectors: pass `query` as `key` as well, "
                "or as `value` without a `key`. Received: another tensor as key, "
                f"key.shape={tuple(key.shape)}, query.shape={tuple(query.shape)}"
            )

    def _check_documents(self, query, call):
        drops = call.training and self._dropout > 0.0
        if drops or not isinstance(query.shape[1], int):
            raise ValueError(
                "`document_ids` need inputs of a fixed length, and dropout=0 in "
                f"training. Received: dropout={self._dropout}, "
                f"query.shape={tuple(query.shape)}"
            )

    def _check_streams(self):
        if self.aligned is False or self.dense_length is not None:
            raise ValueError(
                "A state needs aligned=True or None, and no `dense_length`: otherwise "
                f"chunks depend on later positions. Received: aligned={self.aligned}, "
                f"dense_length={self.dense_length}"
            )

    def _check_num_hashes(self, num_hashes, state):
        if num_hashes is None:
            return
        if state is not None:
            raise ValueError(
                "`num_hashes` cannot be changed while streaming: leave it out of calls "
                f"with a `state`. Received: num_hashes={num_hashes}"
            )
        most = self._rounds_at_most
        if not is_int(num_hashes) or not 1 <= num_hashes <= most:
            raise ValueError(
                f"`num_hashes` must be an integer from 1 to max_hashes={most}. "
                f"Received: num_hashes={num_hashes!r}"
            )

    def _check_arguments(self):
        if self.num_key_value_heads is not None:
            raise ValueError(
                f"{type(self).__name__} does not support `num_key_value_heads`, "
                "because its queries and keys are the same vectors. Received: "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        optional = ("max_hashes", "dense_length", "dense_prefix")
        for name in ("bucket_size", "num_hashes", *optional):
            check_positive_int(name, getattr(self, name), name in optional)
        check_positive_number("key_epsilon", self.key_epsilon)
        if self.dense_prefix is not None and (
            self.dense_length is not None or self.num_local_heads
        ):
            raise ValueError(
                "`dense_prefix` cannot be used together with `dense_length` or "
                f"`num_local_heads`. Received: dense_prefix={self.dense_prefix}, "
                f"dense_length={self.dense_length}, "
                f"num_local_heads={self.num_local_heads}"
            )
        if self._rounds_at_most < self.num_hashes:
            raise ValueError(
                "`max_hashes` must be at least `num_hashes`. Received: "
                f"max_hashes={self.max_hashes}, num_hashes={self.num_hashes}"
            )
        factors = self.num_buckets
        factors = factors if isinstance(factors, tuple) else (factors,)
        if not factors or any(
            not is_int(size) or size < 2 or size % 2 for size in factors
        ):
            raise ValueError(
                "`num_buckets` must be a positive even integer, or a tuple of them. "
                f"Received: num_buckets={self.num_buckets!r}"
            )
        check_bool("aligned", self.aligned, optional=True)
        check_bool("across_buckets", self.across_buckets)
        if self.aligned and self.across_buckets:
            raise ValueError(
                "`across_buckets=True` needs `aligned=False`: an aligned chunk holds "
                "one bucket. Received: across_buckets=True, aligned=True"
            )
        check_bool("scale_logits", self.scale_logits)
        local = self.num_local_heads
        if not is_int(local) or not 0 <= local < self._num_heads:
            raise ValueError(
                "`num_local_heads` must be an integer from 0 to num_heads - 1. "
                f"Received: num_local_heads={local!r}, num_heads={self._num_heads}"
            )


def _one_bucket(query):
    """Buckets that put all positions into one, in one round."""
    batch, length, heads, _ = shape_of(query)
    return ops.zeros((batch, heads, 1, length), "int32")
