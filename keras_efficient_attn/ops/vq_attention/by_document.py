"""Attention to keys through their codes, where several documents share a row.

Counts and sums of codes would begin anew with each document. Instead all pairs are
computed, some queries at a time: time grows with the square of the length.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_layout,
    pad_to,
)
from keras_efficient_attn.ops.common.online_softmax import merge
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.vq_attention.blocks import (
    key_columns,
    one_hot_codes,
    read_mixture,
)
from keras_efficient_attn.ops.vq_attention.codebook import responsibilities
from keras_efficient_attn.ops.vq_attention.config import map_tensors
from keras_efficient_attn.ops.vq_attention.expanded import read


def attend_by_document(query, keys, codebook, config, causal, documents):
    """Partial softmax over the codes of the document's keys beyond the window.

    Args:
        query: `(batch, length, heads, dim)`.
        keys: `Keys` from `keys_for_codes`, with `valid`.
        codebook: `Codebook`.
        config: `VQConfig`.
        causal: Whether query `t` sees keys `0..t` only.
        documents: The `Documents` of queries and keys.

    Returns:
        `(values, totals, log_scale)` for `online_softmax.merge`.
    """
    if not config.gradient_through_cache:
        keys, codebook = (map_tensors(ops.stop_gradient, t) for t in (keys, codebook))
    codes, *mixture = codebook
    length, heads = shape_of(query)[1], query.shape[2]
    tensors = [by_head(t, shape_of(t)[1]) for t in key_columns(keys)]
    if config.soft:
        key, value, valid = tensors
        mixture = [t for t in mixture if t is not None]
        chosen = responsibilities(key, codes, *mixture) * valid
    else:
        *residual, value, valid, index = tensors
        chosen = one_hot_codes(index, valid, codes.shape[1])
    block = [chosen, value] if config.order == 0 else [chosen, *residual, value]
    plan = block_sizes()
    keys_at_once = length if isinstance(length, int) else plan.block
    floats = heads * (2 * codes.shape[1] + 3 * keys_at_once)
    size, chunks, groups = chunk_layout(length, plan.block, query.shape[0], floats)
    places = documents.position, documents.number
    xs = [pad_to(x, groups * chunks * size) for x in (query, *places)]
    rank = None if config.order == 0 else config.expanded_dims(codes.shape[-1])
    step = _step(config.window or 0, causal, rank)
    consts = (codes, *block, *places)
    _, part = recompute_scan(step, (), tuple(xs), consts, num_steps=groups)
    return tuple(y[:, :length] for y in part)


@functools.cache
def _step(window, causal, rank):
    # The expansion has a mean of the keys of a code, earlier and later ones apart.
    two_sided = rank is not None and window and not causal

    def step(carry, x, consts):
        query, position, number = x
        codes, *block, key_position, key_number = consts
        query = by_head(query, shape_of(query)[1])
        same = number[:, :, None] == key_number[:, None]
        distance = position[:, :, None] - key_position[:, None]
        distances = [distance if causal else ops.abs(distance)]
        if two_sided:
            distances = [distance, -distance]
        parts = []
        for distance in distances:
            seen = ops.logical_and(distance >= window, same)
            seen = ops.cast(seen, query.dtype)[:, None, None]
            if rank is not None:
                part = read(query, codes, None, rank, block, seen)
            else:
                logits = query @ ops.swapaxes(codes[:, None], -1, -2)
                part = read_mixture(logits, *block, seen=seen)
            parts.append(tuple(by_position(t) for t in part))
        return carry, tuple(merge(parts) if two_sided else parts[0])

    return step
