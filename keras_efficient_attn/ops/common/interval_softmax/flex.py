"""Softmax over intervals of the keys by FlexAttention, PyTorch's kernel for CUDA.

On a CPU PyTorch computes it without a kernel, and without gradients, for tests.
"""

import copy
import functools
import math

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from keras_efficient_attn.ops.common.interval_softmax.intervals import (
    interleave,
    sequences,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, finish, merge
from keras_efficient_attn.ops.common.private_torch import allow_programs

# Queries and keys of a block.
BLOCK = 128
# Programs that PyTorch may compile for this kernel: one for each dtype, head size,
# number of intervals and kind of mask.
PROGRAMS = 256


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


def attend_interleaved(query, key, value, valid, parts, scale):
    """The output over several parts of the keys; see `choice.choose_kernel`."""
    results = []
    for step, pattern in parts:
        part = attend_part(*sequences(step, query, key, value, valid), pattern, scale)
        results.append(interleave(step, *part))
    return finish(*merge(results), True).to(value.dtype)


def _attend(query, key, value, valid, pattern, scale):
    mask = block_mask(pattern, query.shape[1], valid, query.device)
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    options = dict(block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True))
    if torch.compiler.is_compiling() or not query.is_cuda:
        return flex_attention(*tensors, **options)
    with allow_programs(PROGRAMS):
        return _compile()(*tensors, **options)


@functools.cache
def _compile():
    # With a full graph, exceeding the limit is an error; otherwise PyTorch would
    # compute all pairs without the kernel.
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(pattern, queries, valid, device):
    """The `BlockMask` of a pattern and a key mask."""
    arguments = pattern, queries, valid is not None, BLOCK, device
    if torch.compiler.is_compiling():
        # `torch.compile` cannot trace the cache.
        mask = _make_mask.__wrapped__(*arguments)
    else:
        # Training cannot use tensors made in inference mode.
        with torch.inference_mode(False):
            mask = _make_mask(*arguments)
        if valid is not None:
            mask = copy.copy(mask)
    if valid is not None:
        mask.mask_mod = _hide(mask.mask_mod, valid)
    return mask


def _hide(sees, valid):
    """The mask function of the visible keys that exist."""
    if valid.ndim == 2:

        def mask_mod(batch, head, i, j):
            return sees(batch, head, i, j) & (valid[batch, j] != 0)
    else:

        def mask_mod(batch, head, i, j):
            return sees(batch, head, i, j) & (valid[batch, j, head] != 0)

    return mask_mod


@functools.lru_cache(maxsize=64)
def _make_mask(pattern, queries, is_masked, block, device):
    """The `BlockMask` of a pattern; without full blocks if keys may be hidden."""
    i = torch.arange(queries, device=device)
    bounds = torch.stack(
        [
            torch.stack([first + 0 * i, last + 0 * i])
            for first, last in pattern.intervals(i)
        ]
    )
    seen, full = _seen_blocks(bounds, pattern.keys, block)
    lists = {}
    if not is_masked:
        counts, indices = _list_blocks(full)
        lists.update(full_kv_num_blocks=counts, full_kv_indices=indices)
        seen = seen & ~full
    counts, indices = _list_blocks(seen)
    lists.update(kv_num_blocks=counts, kv_indices=indices)
    bounds = bounds.int()
    count = len(bounds)

    # Reads tensors, so that one compiled program serves all patterns with as many
    # intervals.
    def sees(batch, head, i, j):
        seen = j < 0
        for interval in range(count):
            first, last = bounds[interval, 0, i], bounds[interval, 1, i]
            seen = seen | ((j >= first) & (j <= last))
        return seen

    return BlockMask.from_kv_blocks(
        **lists, BLOCK_SIZE=block, mask_mod=sees, seq_lengths=(queries, pattern.keys)
    )


def _list_blocks(chosen):
    """The number of chosen blocks in each row, and their indices before the others."""
    indices = torch.argsort(chosen.int(), dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], indices.int()[None, None]


def _seen_blocks(bounds, keys, block):
    """Whether the queries of a block see any key, and all keys, of another.

    The last blocks do not count as seen whole if they are not full.

    Returns:
        Two booleans `(blocks, key_blocks)`.
    """
    queries = bounds.shape[-1]
    blocks, key_blocks = -(-queries // block), -(-keys // block)
    i = torch.arange(blocks * block, device=bounds.device).clamp(max=queries - 1)
    start = torch.arange(key_blocks, device=bounds.device) * block
    end = start + block - 1
    seen = torch.zeros(blocks, key_blocks, dtype=torch.bool, device=bounds.device)
    full = torch.zeros_like(seen)
    for first, last in bounds[..., i].view(-1, 2, blocks, block):
        is_empty = last < first
        earliest = torch.where(is_empty, keys, first).amin(1, keepdim=True)
        latest = torch.where(is_empty, -1, last).amax(1, keepdim=True)
        seen = seen | ((end >= earliest) & (start <= latest))
        is_full = (first.amax(1, keepdim=True) <= start) & (
            last.amin(1, keepdim=True) >= end
        )
        full = full | is_full
    is_whole = torch.arange(1, blocks + 1, device=bounds.device) * block <= queries
    return seen, full & is_whole[:, None]
