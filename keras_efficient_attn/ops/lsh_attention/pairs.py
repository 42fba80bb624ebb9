"""LSH attention over all pairs of positions: faster for short sequences.

Blocks of queries read all keys that may be visible; the codes of chunks say which are.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.block_softmax import fused_module
from keras_efficient_attn.ops.common.numerics import unit_vectors
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.lsh_attention.chunked import masked_part, with_self
from keras_efficient_attn.ops.lsh_attention.layout import (
    codes_by_document,
    cut_into_chunks,
)

# Each block is written out in a compiled program.
MAX_BLOCKS = 8
# The batch size where it is not known.
LIKELY_ROWS = 32


def prefers_pairs(query, rounds, config):
    """Whether all pairs take less time than sorted chunks, and not much memory."""
    length, plan = query.shape[1], block_sizes()
    if not isinstance(length, int):
        return False
    slots = length
    if config.aligned:
        # On average half a chunk of each bucket is empty.
        slots += config.num_buckets * config.chunk_size // 2
    in_chunks = rounds * slots * 2 * config.chunk_size
    if length**2 // (2 if config.causal else 1) > plan.lsh_pairs * in_chunks:
        return False
    if fused_module(query) is not None:
        return True
    return _number_of_pairs(query) <= MAX_BLOCKS * plan.lsh_block_floats


def pairs_lsh_attention(query, value, buckets, kept, config, documents=None):
    """Computes `chunked_lsh_attention` without dropout, for a known length.

    With `Documents`, each of them has chunks of its own.
    """
    if query.shape[1] == 0:
        return value
    if documents is None:
        chunks = cut_into_chunks(buckets, kept, config)
        codes = chunks.code, chunks.before
    else:
        codes = codes_by_document(buckets, kept, config, documents)
    key, query = unit_vectors(query), query * config.scale
    fused = fused_module(query)
    if fused is None:
        output = _attend_in_blocks(query, key, value, codes, config.causal)
    else:
        kind = "earlier codes" if config.causal else "codes"
        values, totals, _ = fused.attend(kind, query, key, value, None, codes)
        output = with_self(values, totals, value)
    return ops.where(kept[:, :, None, None], output, 0.0)


def _attend_in_blocks(query, key, value, codes, causal):
    code, before = codes
    length, plan = query.shape[1], block_sizes()
    blocks = max(
        length // (4 * plan.block), _number_of_pairs(query) // plan.lsh_block_floats
    )
    blocks = min(max(1, blocks), MAX_BLOCKS, length)
    outputs = []
    for block in range(blocks):
        start, stop = length * block // blocks, length * (block + 1) // blocks
        last = stop if causal else length
        keys = key[:, :last], value[:, :last], code[..., :last]
        consts = (*keys, before[..., start:stop])
        _, (output,) = recompute_scan(
            _block_step(start, causal), (), (query[:, start:stop],), consts, num_steps=1
        )
        outputs.append(output)
    return ops.concatenate(outputs, axis=1)


# One object per block, as JAX needs it.
@functools.cache
def _block_step(start, causal):
    """Attends from the queries from `start` on."""

    def step(carry, x, consts):
        key, value, code, before = consts
        query, key, value = (ops.transpose(t, (0, 2, 1, 3)) for t in (*x, key, value))
        queries, keys = query.shape[2], key.shape[2]
        own, i = slice(start, start + queries), ops.arange(queries) + start
        j = ops.arange(keys)
        allowed = j < i[:, None] if causal else j != i[:, None]
        seen = False
        for r in range(code.shape[2]):
            key_codes, query_codes = code[:, :, r, None], code[:, :, r, own, None]
            seen = ops.logical_or(seen, key_codes == query_codes)
            seen = ops.logical_or(seen, key_codes == before[:, :, r, :, None])
        logits = query @ ops.swapaxes(key, -1, -2)
        seen = ops.logical_and(seen, allowed)
        values, totals, _ = masked_part(logits, seen, value)
        output = with_self(values, totals, value[:, :, own])
        return carry, (ops.transpose(output, (0, 2, 1, 3)),)

    return step


def _number_of_pairs(query):
    batch, length, heads, _ = query.shape
    return (batch if isinstance(batch, int) else LIKELY_ROWS) * heads * length**2
