"""LSH attention by its definition, as a dense matrix."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import unit_vectors
from keras_efficient_attn.ops.lsh_attention.chunked import masked_part, with_self


def visible_pairs(buckets, kept, config):
    """Mask of the keys seen in any round, `(batch, heads, length, length)`."""
    length = shape_of(buckets)[-1]
    position = ops.arange(length, dtype="int32")
    later = position[:, None] > position[None, :]
    same = buckets[..., :, None] == buckets[..., None, :]
    ahead = ops.logical_and(same, later)
    if not config.aligned:
        other = buckets[..., :, None] > buckets[..., None, :]
        ahead = ops.logical_or(ahead, other)
    # A position's chunk, from the number of positions before it in the same cut.
    ahead = ops.logical_and(ahead, kept[:, None, None, None, :])
    chunk = ops.sum(ops.cast(ahead, "int32"), axis=-1) // config.chunk_size
    query_chunk, key_chunk = chunk[..., :, None], chunk[..., None, :]
    near = ops.logical_or(query_chunk == key_chunk, query_chunk == key_chunk + 1)
    if config.across_buckets:
        last = ops.max(ops.where(kept[:, None, None], chunk, 0), axis=-1)
        wraps = ops.logical_and(query_chunk == 0, key_chunk == last[..., None, None])
        near = ops.logical_or(near, wraps)
    else:
        near = ops.logical_and(near, same)
    seen = ops.any(near, axis=2)
    seen = ops.logical_and(seen, kept[:, None, :, None])
    seen = ops.logical_and(seen, kept[:, None, None, :])
    other = later if config.causal else position[:, None] != position[None, :]
    return ops.logical_and(seen, other)


def reference_lsh_attention(query, value, buckets, kept, config):
    """Computes `lsh_attention` without dropout."""
    allowed = visible_pairs(buckets, kept, config)
    query, value = (ops.transpose(t, (0, 2, 1, 3)) for t in (query, value))
    logits = (query * config.scale) @ ops.swapaxes(unit_vectors(query), -1, -2)
    values, totals, _ = masked_part(logits, allowed, value)
    output = with_self(values, totals, value)
    output = ops.where(kept[:, None, :, None], output, 0.0)
    return ops.transpose(output, (0, 2, 1, 3))
