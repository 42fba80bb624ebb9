"""Causal LSH attention with a state: the last keys of each bucket."""

import functools

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import chunk_count, pad_to
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, unit_vectors
from keras_efficient_attn.ops.common.online_softmax import merge
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.rows import take_rows
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.common.state import make_state, write_positions
from keras_efficient_attn.ops.lsh_attention.chunked import masked_part, with_self


def lsh_attention_state(
    batch_size,
    num_heads,
    rounds,
    num_buckets,
    chunk_size,
    dim,
    value_dim,
    *,
    dtype="float32",
):
    """The state of causal LSH attention before the first position.

    Args:
        batch_size, num_heads: Sizes.
        rounds: Number of rounds of hashing.
        num_buckets, chunk_size: As for `lsh_attention`.
        dim: Size of the queries.
        value_dim: Size of the values.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of `"cache"` and `"count"`: the last `2 · chunk_size` keys of each bucket,
        with their values, and the number of keys that each bucket has had. Batch first.
    """
    sizes = (batch_size, num_heads, rounds, num_buckets, chunk_size, dim, value_dim)
    return make_state(lsh_attention_state_spec(*sizes, dtype))


def lsh_attention_state_spec(
    batch_size, num_heads, rounds, num_buckets, chunk_size, dim, value_dim, dtype
):
    """Names, shapes, dtypes and values of the state before the first position.

    Returns:
        Dict of `cache` `(batch, heads, rounds, num_buckets · 2 chunk_size + 1, dim +
        value_dim + rounds)`: key, value and codes of the last keys of each bucket, and
        a row for hidden positions; and `count` `(batch, heads, rounds, num_buckets)`,
        the number of keys in each bucket. Both hold integers exactly up to 2^24 in
        float32: counts, and codes, which are at most `(count // chunk_size + 2) ·
        num_buckets`.
    """
    rows = num_buckets * 2 * chunk_size + 1
    shape = (batch_size, num_heads, rounds)
    # Code −1 means no chunk.
    row = np.concatenate([np.zeros(dim + value_dim), np.full(rounds, -1.0)])
    return {
        "cache": ((*shape, rows, len(row)), dtype, row),
        "count": ((*shape, num_buckets), dtype),
    }


def streamed_lsh_attention(query, value, buckets, kept, config, state, dropout):
    """The causal, aligned `lsh_attention`, and the new state.

    The cache has two chunks of keys per bucket; a key's rank in its bucket is its slot.
    """
    batch, length, heads, dim = query.shape
    rounds, value_dim = buckets.shape[2], value.shape[-1]
    rows = max(1, batch) if isinstance(batch, int) else 1
    found = heads * rounds * 2 * config.chunk_size * (dim + value_dim) * rows
    # Each position of a step gathers the keys of its own bucket.
    block = max(1, min(config.chunk_size, block_sizes().found_floats // found))
    if isinstance(length, int):
        block = min(block, max(1, length))
    else:
        length = shape_of(query)[1]
    steps = chunk_count(length, block)
    dtype = query.dtype
    buckets = ops.cast(ops.transpose(buckets, (0, 3, 1, 2)), dtype)
    inputs = (query, value, buckets, ops.cast(kept, dtype))
    xs = tuple(pad_to(t, steps * block) for t in inputs)
    step = _step(dim, value_dim, rounds, config)
    consts = ()
    if dropout is not None:
        # For queries in a chunk: keys from the cache and from the block.
        consts = (dropout[..., :block, :], dropout[:, :, 0, :block, :block])
    carry = (state["cache"], state["count"])
    (cache, count), (output,) = recompute_scan(
        step, carry, xs, consts, num_steps=steps, step_size=block
    )
    return output[:, :length], {"cache": cache, "count": count}


@functools.cache
def _step(dim, value_dim, rounds, config):
    num_buckets, chunk_size = config.num_buckets, config.chunk_size
    ring = 2 * chunk_size
    cache_rows, width = num_buckets * ring + 1, dim + value_dim + rounds

    def step(carry, x, consts):
        cache, count = carry
        query, value, bucket, kept = x
        batch, block, heads = shape_of(query)[:3]
        query, value = (ops.transpose(t, (0, 2, 1, 3)) for t in (query, value))
        bucket = ops.cast(ops.transpose(bucket, (0, 2, 3, 1)), "int32")
        kept = kept > 0

        # The number of earlier keys in each position's bucket.
        position = ops.arange(block)
        earlier = ops.logical_and(
            position[:, None] > position, kept[:, None, None, None, :]
        )
        same = bucket[..., :, None] == bucket[..., None, :]
        same = ops.logical_and(same, earlier)
        rank = ops.cast(ops.take_along_axis(count, bucket, axis=-1), "int32")
        rank = rank + ops.cast(ops.sum(ops.cast(same, "int32"), axis=-1), "int32")
        code = (rank // chunk_size + 1) * num_buckets + bucket
        before = code - num_buckets

        def near(key_code, code, before):
            return ops.logical_or(key_code == code, key_code == before)

        # The keys of this block.
        in_round = near(code[..., None, :], code[..., :, None], before[..., :, None])
        seen = ops.any(ops.logical_and(in_round, same), axis=2)
        key, scaled = unit_vectors(query), query * config.scale
        logits = scaled @ ops.swapaxes(key, -1, -2)
        parts = [masked_part(logits, seen, value, consts[1] if consts else None)]

        # The keys of the cache, round by round; a key counts in the first round only.
        index = bucket[..., None] * ring + ops.arange(ring, dtype="int32")
        index = ops.reshape(index, (batch, heads * rounds, block * ring))
        table = ops.reshape(cache, (batch, heads * rounds, cache_rows, width))
        found = ops.reshape(
            take_rows(index, table)[0], (batch, heads, rounds, block, ring, width)
        )
        old_key, old_value = found[..., :dim], found[..., dim : dim + value_dim]
        old_code = ops.cast(found[..., dim + value_dim :], "int32")
        for r in range(rounds):
            seen = None
            for other in range(r, -1, -1):
                also = near(
                    old_code[:, :, r, ..., other],
                    code[:, :, other, :, None],
                    before[:, :, other, :, None],
                )
                if seen is None:
                    seen = also
                else:
                    seen = ops.logical_and(seen, ops.logical_not(also))
            logits = ops.einsum("bhnd,bhnsd->bhns", scaled, old_key[:, :, r])
            dropout = consts[0][:, :, r, :, None, :] if consts else None
            part = masked_part(
                logits[..., None, :], seen[..., None, :], old_value[:, :, r], dropout
            )
            parts.append((part[0][..., 0, :], part[1][..., 0], part[2][..., 0]))
        values, totals, _ = merge(parts)
        output = with_self(values, totals, value)
        output = ops.where(kept[:, None, :, None], output, 0.0)

        # Each key replaces the key two chunks before it.
        visible = kept[:, None, None, :]
        place = ops.where(visible, bucket * ring + rank % ring, cache_rows - 1)
        codes = ops.cast(ops.transpose(code, (0, 1, 3, 2)), cache.dtype)
        codes = ops.where(kept[:, None, :, None], codes, -1.0)
        new = ops.concatenate([key, value, codes], axis=-1)[:, :, None]
        new = ops.broadcast_to(new, (batch, heads, rounds, block, width))
        offset = ops.arange(batch * heads * rounds, dtype="int32") * cache_rows
        place = place + ops.reshape(offset, (batch, heads, rounds, 1))
        shape = shape_of(cache)
        cache = ops.scatter_update(
            ops.reshape(cache, (batch * heads * rounds * cache_rows, width)),
            ops.reshape(place, (-1, 1)),
            ops.reshape(new, (-1, width)),
        )
        ones = ops.one_hot(bucket, num_buckets, dtype=count.dtype)
        ones = ops.where(visible[..., None], ones, 0.0)
        count = count + ops.sum(ones, axis=3)
        output = ops.transpose(output, (0, 2, 1, 3))
        return (ops.reshape(cache, shape), count), (output,)

    return step


def dense_prefix_attention(tensors, prefix, start, lengths, scale):
    """Attention of a segment to all earlier ones of a stream's first positions.

    Args:
        tensors: `(query, value)` of the segment, `(batch, length, heads, dim)`; queries
            are the keys before their norm.
        prefix: The two of the first positions, `(batch, positions, heads, dim)`.
        start: Integers `(batch,)`: the position of a row's first query.
        lengths: Integers `(batch,)`: how many positions of the segment exist; `None`
            for all.
        scale: Factor of the logits.

    Returns:
        `(heads, prefix)`: outputs, those of later positions without meaning, and the
        first positions with the segment's.
    """
    batch, length = shape_of(tensors[0])[:2]
    if lengths is None:
        lengths = ops.full((batch,), length, "int32")
    segment = [ops.cast(x, old.dtype) for x, old in zip(tensors, prefix, strict=True)]
    prefix = write_positions(prefix, segment, start, lengths)
    dtype = accumulator_dtype(*tensors)
    query, key, value, own_value = (
        ops.transpose(ops.cast(x, dtype), (0, 2, 1, 3))
        for x in (tensors[0], *prefix, tensors[1])
    )
    logits = (query * scale) @ ops.swapaxes(unit_vectors(key), -1, -2)
    step = start[:, None] + ops.arange(length, dtype="int32")
    earlier = ops.arange(shape_of(key)[2], dtype="int32") < step[..., None]
    values, totals, _ = masked_part(logits, earlier[:, None], value)
    heads = with_self(values, totals, own_value)
    return ops.transpose(heads, (0, 2, 1, 3)), prefix
