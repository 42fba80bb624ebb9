"""Softmax over intervals of the keys by FlexAttention, PyTorch's kernel for CUDA.

On a CPU PyTorch computes it without a kernel, and without gradients, for tests.
"""

import functools
import math

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from keras_efficient_attn.ops.common.interval_softmax.intervals import sees
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

# Queries and keys of a block.
BLOCK = 128


def attend(query, key, value, valid, pattern, scale):
    """The output of softmax attention; see `choice.choose_kernel`."""
    return _attend(query, key, value, valid, pattern, scale)[0].transpose(1, 2)


def attend_part(query, key, value, valid, pattern, scale):
    """Computes `attend` as `(values, totals, log_scale)` for `online_softmax.merge`."""
    output, aux = _attend(query, key, value, valid, pattern, scale)
    log_scale = aux.lse.transpose(1, 2)
    seen = log_scale > -math.inf
    return (
        output.transpose(1, 2).float(),
        seen.float(),
        torch.where(seen, log_scale, LOG_ZERO),
    )


def _attend(query, key, value, valid, pattern, scale):
    mask = block_mask(pattern, query.shape[1], valid, query.device)
    compute = _compile() if query.is_cuda else flex_attention
    return compute(
        *(x.transpose(1, 2) for x in (query, key, value)),
        block_mask=mask,
        scale=scale,
        return_aux=AuxRequest(lse=True),
    )


@functools.cache
def _compile():
    return torch.compile(flex_attention)


def block_mask(pattern, queries, valid, device):
    """The `BlockMask` of a pattern and a key mask."""
    if valid is None:

        def mask_mod(batch, head, i, j):
            return sees(pattern, i, j)
    elif valid.ndim == 2:

        def mask_mod(batch, head, i, j):
            return sees(pattern, i, j) & (valid[batch, j] != 0)
    else:

        def mask_mod(batch, head, i, j):
            return sees(pattern, i, j) & (valid[batch, j, head] != 0)

    seen = _seen_blocks(pattern, queries, device)
    counts = seen.sum(1, dtype=torch.int32)
    # The visible blocks, followed by the others.
    indices = torch.argsort(seen.int(), dim=1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        counts[None, None],
        indices[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(queries, pattern.keys),
    )


def _seen_blocks(pattern, queries, device):
    """Whether a block of queries sees any key of a block: `(blocks, blocks)`."""
    blocks, key_blocks = -(-queries // BLOCK), -(-pattern.keys // BLOCK)
    i = torch.arange(blocks * BLOCK, device=device).clamp(max=queries - 1)
    number = torch.arange(key_blocks, device=device)
    seen = torch.zeros(blocks, key_blocks, dtype=torch.bool, device=device)
    for first, last in pattern.intervals(i):
        first, last = (first + 0 * i).clamp(min=0), last + 0 * i
        is_empty = last < first
        first = torch.where(is_empty, pattern.keys, first).view(blocks, BLOCK).amin(1)
        last = torch.where(is_empty, -1, last).view(blocks, BLOCK).amax(1)
        after = number >= first[:, None] // BLOCK
        seen = seen | (after & (number <= last[:, None] // BLOCK))
    return seen
