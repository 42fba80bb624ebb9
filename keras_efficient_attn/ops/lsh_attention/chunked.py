"""LSH attention over sorted chunks."""

import dataclasses
import functools
import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    max_along,
    pad,
    unit_vectors,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide, merge
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.lsh_attention.layout import cut_into_chunks, make_layout


def chunked_lsh_attention(query, value, buckets, kept, config, dropout):
    """Computes `lsh_attention`.

    Args:
        query, value, buckets: As for `lsh_attention`, with zeros at hidden positions.
            float16 and bfloat16 are cast to the accumulator's dtype step by step.
        kept: Boolean `(batch, length)`, `False` for hidden positions.
        config: `LSHConfig`.
        dropout: The `dropout_mask` of `lsh_attention`, or `None`.
    """
    batch, length, heads, dim = shape_of(query)
    rounds = buckets.shape[2]
    dtype = accumulator_dtype(query, value)
    if isinstance(length, int):
        chunk_size = max(1, min(config.chunk_size, length))
        config = dataclasses.replace(config, chunk_size=chunk_size)
    chunk_size = config.chunk_size
    # An additional hidden position fills the empty slots.
    padded = [pad_length(t, 0, 1) for t in (query, value)]
    kept = ops.cast(pad(ops.cast(kept, "int32"), [(0, 0), (0, 1)]), "bool")
    buckets = pad(buckets, [(0, 0)] * 3 + [(0, 1)])

    floats = heads * rounds * (6 * chunk_size + 2 * (dim + (value.shape[-1] or dim)))
    floats = max(1, int(floats / block_sizes().lsh_steps))
    chunks = cut_into_chunks(buckets, kept, config)
    layout = make_layout(chunks, chunk_size, floats)
    tables = ops.concatenate(padded, axis=-1), _ids(chunks, length + 1, dtype)
    tables = [
        ops.reshape(t, (batch * (length + 1) * heads, shape_of(t)[-1])) for t in tables
    ]
    row, head, number = (
        ops.reshape(ops.arange(size, dtype="int32"), shape)
        for size, shape in (
            (batch, (batch, 1, 1, 1)),
            (heads, (heads, 1, 1)),
            (rounds, (rounds, 1)),
        )
    )

    def place(token):
        """The places of positions in the tables."""
        return (row * (length + 1) + token) * heads + head

    tile = (layout.tiles, layout.chunks_in_tile, chunk_size)
    places = ops.reshape(place(layout.token), (batch, heads, rounds, *tile))
    places = ops.transpose(places, (3, 4, 0, 1, 2, 5))
    last = [ops.take(t, place(layout.last_token), axis=0)[None] for t in tables]
    xs = [ops.take(t, places, axis=0) for t in tables]
    # Rows of ids would be short vectors.
    xs[1], last[1] = (ops.swapaxes(t, -1, -2) for t in (xs[1], last[1]))
    step = _step(query.shape[-1], rounds, config.causal, config.scale)
    consts = () if dropout is None else (dropout[..., :chunk_size, : 2 * chunk_size],)
    _, part = recompute_scan(step, tuple(last), tuple(xs), consts)

    slot = chunks.slot[..., :length]
    sequences = batch * heads * rounds
    # By chunk, then by sequence.
    places = slot // chunk_size * sequences + (row * heads + head) * rounds + number
    places = places * chunk_size + slot % chunk_size
    hidden = ops.logical_not(kept[:, None, None, :length])

    def by_position(x, otherwise):
        """`(tiles, chunks, batch, heads, rounds, size, ...)`, sorted by position."""
        width = shape_of(x)[6:]
        slots = sequences * shape_of(layout.token)[-1]
        x = ops.take(ops.reshape(x, (slots, *width)), places, axis=0)
        return ops.where(
            hidden[..., None] if width else hidden, otherwise, ops.cast(x, dtype)
        )

    values, totals, scales = map(by_position, part, (0.0, 0.0, LOG_ZERO))
    values, totals, _ = merge(
        [(values[:, :, r], totals[:, :, r], scales[:, :, r]) for r in range(rounds)]
    )
    own = ops.transpose(ops.cast(value, dtype), (0, 2, 1, 3))
    output = with_self(values, totals, own)
    output = ops.where(hidden[:, :, 0, :, None], 0.0, output)
    return ops.transpose(output, (0, 2, 1, 3))


def _ids(chunks, length, dtype):
    """Position, codes and previous codes: `(batch, length, heads, 1 + 2 rounds)`."""
    position = ops.arange(length, dtype="int32") + ops.zeros_like(chunks.code[:, :, 0])
    # Empty slots get a position that no other position precedes.
    position = ops.where(chunks.code[:, :, 0] < 0, -1, position)
    ids = ops.concatenate([position[:, :, None], chunks.code, chunks.before], axis=2)
    return ops.cast(ops.transpose(ids, (0, 3, 1, 2)), dtype)


@functools.cache
def _step(dim, rounds, causal, scale):
    def step(carry, x, consts):
        (last, last_ids), (rows, ids) = carry, x
        dtype = ids.dtype
        before = _shifted(last, rows)
        (shared, value), (shared_before, value_before) = (
            (ops.cast(t[..., :dim], dtype), ops.cast(t[..., dim:], dtype))
            for t in (rows, before)
        )
        seen = _seen(ids, _shifted(last_ids, ids), rounds, causal)

        query = shared * scale
        logits = ops.concatenate(
            [
                query @ ops.swapaxes(unit_vectors(t, dim), -1, -2)
                for t in (shared_before, shared)
            ],
            axis=-1,
        )
        weights, totals, scales = masked_weights(logits, seen, *consts)
        size = shape_of(rows)[4]
        values = weights[..., :size] @ value_before + weights[..., size:] @ value
        # As narrow as the rows: these are the largest tensors.
        values = ops.cast(values, rows.dtype)
        carry = rows[-1:], ids[-1:]
        return carry, (values, totals, ops.stop_gradient(scales))

    return step


def _shifted(first, chunks):
    """The chunk before each chunk, along the first axis."""
    return ops.concatenate([first, chunks[:-1]], axis=0)


def _seen(ids, ids_before, rounds, causal):
    """Whether positions see those of the chunk before and of their own.

    Args:
        ids: Columns of `_ids`, `(chunks, batch, heads, rounds, 1 + 2 rounds, size)`.
        ids_before: Those of the chunks before.

    Returns:
        `(chunks, batch, heads, rounds, size, 2 size)`.
    """
    here = ids[..., None]
    there = ops.concatenate([ids_before, ids], axis=-1)[..., None, :]
    size = shape_of(ids)[-1]
    position, key_position = here[..., 0, :, :], there[..., 0, :, :]
    allowed = key_position < position if causal else key_position != position
    seen_in = []
    for r in range(rounds):

        def codes(other, r=r):
            """The codes of keys in another round, and both that a query sees."""
            code, before = 1 + other, 1 + rounds + other
            own = (here[:, :, :, r, number] for number in (code, before))
            return there[:, :, :, r, code], *own

        keys, code, before = codes(r)
        seen = ops.concatenate(
            [keys[..., :size] == before, keys[..., size:] == code], axis=-1
        )
        seen = ops.logical_and(seen, allowed[:, :, :, r])
        for earlier in range(r):
            # A key seen in an earlier round counts in that round.
            keys, code, before = codes(earlier)
            also = ops.logical_or(keys == code, keys == before)
            seen = ops.logical_and(seen, ops.logical_not(also))
        seen_in.append(seen)
    return ops.stack(seen_in, axis=3)


def masked_weights(logits, allowed, dropout_mask=None):
    """Weights of `(..., queries, keys)` logits, their totals and log scales."""
    # The exponential of minus infinity is 0, and fast.
    logits = ops.where(allowed, logits, -math.inf)
    scale = max_along(ops.stop_gradient(logits), axis=-1, initial=LOG_ZERO)
    weights = ops.exp(logits - scale[..., None])
    totals = ops.sum(weights, axis=-1)
    if dropout_mask is not None:
        weights = weights * dropout_mask
    return weights, totals, scale


def masked_part(logits, allowed, value, dropout_mask=None):
    """The part `(values, totals, log_scale)` of `(..., queries, keys)` logits."""
    weights, totals, scale = masked_weights(logits, allowed, dropout_mask)
    return weights @ value, totals, scale


def with_self(values, totals, own_value):
    """Normalises; a query that sees no other key gets its own value."""
    alone = (totals == 0.0)[..., None]
    return ops.where(alone, own_value, divide(values, totals))
