"""LSH attention over sorted chunks."""

import dataclasses
import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.numerics import pad
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, merge
from keras_efficient_attn.ops.common.plan import device_plan
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.lsh_attention.layout import cut_into_chunks, make_layout
from keras_efficient_attn.ops.lsh_attention.shared import (
    columns_of,
    masked_part,
    take_rows,
    unit,
    with_self,
)


def chunked_lsh_attention(query, value, buckets, kept, config, dropout):
    """Computes `lsh_attention` with all tensors in the accumulator's dtype.

    Args:
        query, value, buckets: As for `lsh_attention`, with zeros at hidden positions.
        kept: Boolean `(batch, length)`, `False` for hidden positions.
        config: `LSHConfig`.
        dropout: The `dropout_mask` of `lsh_attention`, or `None`.
    """
    batch, length, heads, dim = shape_of(query)
    rounds = buckets.shape[2]
    value_dim = shape_of(value)[-1]
    if isinstance(length, int):
        chunk_size = max(1, min(config.chunk_size, length))
        config = dataclasses.replace(config, chunk_size=chunk_size)
    chunk_size = config.chunk_size
    # An additional hidden position fills the empty slots.
    query, value = (pad_length(t, 0, 1) for t in (query, value))
    kept = ops.cast(pad(ops.cast(kept, "int32"), [(0, 0), (0, 1)]), "bool")
    buckets = pad(buckets, [(0, 0)] * 3 + [(0, 1)])

    floats = heads * rounds * (6 * chunk_size + 2 * (dim + (value.shape[-1] or dim)))
    floats = max(1, floats // device_plan().lsh_steps)
    chunks = cut_into_chunks(buckets, kept, config)
    layout = make_layout(chunks, chunk_size, floats)
    table = ops.concatenate([query, value], axis=-1)
    table = ops.concatenate(
        [ops.transpose(table, (0, 2, 1, 3)), _ids(chunks, length + 1, query.dtype)],
        axis=-1,
    )
    width = dim + value_dim + 1 + 2 * rounds

    def rows(token):
        """The rows of these positions, `(batch, heads, rounds, slots, width)`."""
        slots = shape_of(token)[-1]
        token = ops.reshape(token, (batch, heads, rounds * slots))
        return ops.reshape(
            take_rows(table, token), (batch, heads, rounds, slots, width)
        )

    tile = (layout.chunks_in_tile, chunk_size)
    slots = shape_of(layout.token)[-1]
    shape = (batch, heads, rounds, layout.tiles, *tile, width)
    x = ops.moveaxis(ops.reshape(rows(layout.token), shape), 3, 0)
    last = rows(layout.last_token)[:, :, :, None]
    step = _step(query.shape[-1], value.shape[-1], rounds, config.causal, config.scale)
    consts = () if dropout is None else (dropout[..., :chunk_size, : 2 * chunk_size],)
    _, (sums,) = recompute_scan(step, (last,), (x,), consts)

    sums = ops.reshape(
        ops.moveaxis(sums, 0, 3), (batch, heads * rounds, slots, value_dim + 2)
    )
    slot = ops.reshape(chunks.slot, (batch, heads * rounds, length + 1))
    sums = ops.reshape(
        take_rows(sums, slot[..., :length]),
        (batch, heads, rounds, length, value_dim + 2),
    )
    hidden = ops.logical_not(kept[:, None, None, :length])
    values = ops.where(hidden[..., None], 0.0, sums[..., :-2])
    totals = ops.where(hidden, 0.0, sums[..., -2])
    scales = ops.where(hidden, LOG_ZERO, ops.stop_gradient(sums[..., -1]))
    values, totals, _ = merge(
        [(values[:, :, r], totals[:, :, r], scales[:, :, r]) for r in range(rounds)]
    )
    own = ops.transpose(value[:, :length], (0, 2, 1, 3))
    output = with_self(values, totals, own)
    output = ops.where(hidden[:, :, 0, :, None], 0.0, output)
    return ops.transpose(output, (0, 2, 1, 3))


def _ids(chunks, length, dtype):
    """Position, codes and previous codes: `(batch, heads, length, 1 + 2 rounds)`."""
    position = ops.arange(length, dtype="int32") + ops.zeros_like(chunks.code[:, :, 0])
    # Empty slots get a position that no other position precedes.
    position = ops.where(chunks.code[:, :, 0] < 0, -1, position)
    ids = ops.concatenate([position[:, :, None], chunks.code, chunks.before], axis=2)
    return ops.cast(ops.transpose(ids, (0, 1, 3, 2)), dtype)


@functools.cache
def _step(dim, value_dim, rounds, causal, scale):
    def cut(rows, value_dim):
        return columns_of(rows, dim, value_dim, 1, rounds, rounds)

    def step(carry, x, consts):
        (last,), (rows,) = carry, x
        width = value_dim or shape_of(rows)[-1] - dim - 1 - 2 * rounds
        chunk_size = shape_of(rows)[4]
        before = ops.concatenate([last, rows[:, :, :, :-1]], axis=3)
        query, _, position, code, code_before = cut(rows, width)
        keys = ops.concatenate([before, rows], axis=4)
        shared, value, key_position, key_code, _ = cut(keys, width)

        def against(ids, key_ids):
            """Pairs of `(..., queries, 1)` and `(..., 1, keys)`."""
            return ids, ops.swapaxes(key_ids, -1, -2)

        position, key_position = against(position, key_position)
        allowed = key_position < position if causal else key_position != position
        allowed_in = []
        for r in range(rounds):
            own, key_own = against(
                code[:, :, r, ..., r : r + 1], key_code[:, :, r, ..., r : r + 1]
            )
            seen = ops.concatenate(
                [
                    key_own[..., :chunk_size] == code_before[:, :, r, ..., r : r + 1],
                    key_own[..., chunk_size:] == own,
                ],
                axis=-1,
            )
            seen = ops.logical_and(seen, allowed[:, :, r])
            for earlier in range(r):
                # A key seen in an earlier round counts in that round.
                one = slice(earlier, earlier + 1)
                here, there = against(
                    code[:, :, r, ..., one], key_code[:, :, r, ..., one]
                )
                also = ops.logical_or(
                    there == here, there == code_before[:, :, r, ..., one]
                )
                seen = ops.logical_and(seen, ops.logical_not(also))
            allowed_in.append(seen)
        allowed = ops.stack(allowed_in, axis=2)
        logits = (query * scale) @ ops.swapaxes(unit(shared), -1, -2)
        dropout = consts[0][:, :, :, None] if consts else None
        values, totals, scales = masked_part(logits, allowed, value, dropout)
        sums = ops.concatenate([values, totals[..., None], scales[..., None]], axis=-1)
        # TensorFlow loses the rank if the width is unknown.
        sums = ops.reshape(sums, (*shape_of(rows)[:5], width + 2))
        return (rows[:, :, :, -1:],), (sums,)

    return step
