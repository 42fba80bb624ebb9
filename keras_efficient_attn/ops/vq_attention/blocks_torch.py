"""Causal attention to hard codes on CPUs, by PyTorch's fused kernel.

The kernel reads the mean values before each block, with log counts as the mask. Values
are summed by row index, not by products with one-hot codes.
"""

import torch
from torch import Tensor

from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.derivatives_torch import (
    refuse_second_derivatives,
)
from keras_efficient_attn.ops.common.fused_softmax_torch import attend
from keras_efficient_attn.ops.common.masks import QueryBlocks
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, merge
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.vq_attention.blocks import MIN_COUNT
from keras_efficient_attn.ops.vq_attention.codebook import look_up


def causal_code_attention(query, keys, codebook, cache, config):
    """Computes `windowed.causal_code_attention` of hard codes.

    Arguments are as there; `keys` has an `index`, and codes get no gradient.
    """
    codes = codebook.codes
    (batch, length, heads, _), number = query.shape, codes.shape[1]
    size = min(config.block_size(number), length)
    key = look_up(codes, keys.index)
    own = query, key, keys.value, keys.valid
    own = attend("band", *own, [], QueryBlocks(size, 0, True))
    blocks = -(-length // size)
    rows = keys.index.long() + number * torch.arange(heads)
    valid = keys.valid[..., None].expand(rows.shape)
    query, value, rows, valid = (
        pad_length(t, 0, blocks * size - length).unflatten(1, (blocks, size))
        for t in (query, keys.value, rows, valid)
    )
    sums, counts = (t.flatten(1, 2) for t in cache)
    group = max(1, block_sizes().step_floats // sums.numel())
    parts = []
    for first in range(0, blocks, group):
        present = slice(first, first + group)
        chosen = rows[:, present].flatten(2)
        # The counts before each block, and after the last.
        local = counts.new_zeros(*chosen.shape[:2], counts.shape[1])
        local.scatter_add_(2, chosen, valid[:, present].flatten(2))
        all_counts = torch.cat([counts[:, None], local], 1).cumsum(1)
        before, counts = all_counts[:, :-1], all_counts[:, -1]
        full = before > MIN_COUNT
        inverse = torch.where(full, 1.0 / before, 0.0)
        means, sums = code_means_op(
            value[:, present].flatten(2, 3), chosen, inverse, sums
        )
        # (batch · blocks, codes, heads, value_dim)
        means = means.unflatten(2, (heads, number)).flatten(0, 1).transpose(1, 2)
        log_weight = torch.where(full, before.log(), LOG_ZERO)
        log_weight = log_weight.unflatten(2, (heads, number)).flatten(0, 1)
        key = codes.transpose(0, 1).expand(len(means), -1, -1, -1)
        inputs = query[:, present].flatten(0, 1), key, means, None
        part = attend("weighted", *inputs, [log_weight])
        parts.append([t.unflatten(0, (batch, -1)).flatten(1, 2) for t in part])
    far = [torch.cat(groups, 1)[:, :length] for groups in zip(*parts, strict=True)]
    cache = tuple(t.unflatten(1, (heads, number)) for t in (sums, counts))
    return merge([far, own]), cache


@torch.library.custom_op("keras_efficient_attn::code_means", mutates_args=())
def code_means_op(
    value: Tensor, rows: Tensor, inverse: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """The row means before each block, and the sums after the last block.

    Args:
        value: `(batch, blocks, keys, value_dim)`.
        rows: `(batch, blocks, keys)`, the row to which each value is added.
        inverse: `(batch, blocks, rows)`, factors of the sums, without gradient.
        first: `(batch, rows, value_dim)`, the sums before the first block.
    """
    (batch, blocks), number = rows.shape[:2], first.shape[1]
    means = value.new_zeros(batch, blocks, *first.shape[1:])
    places = number * torch.arange(batch * blocks).view(batch, blocks, 1) + rows
    flat = means.view(-1, first.shape[-1])
    flat.index_add_(0, places.flatten(), value.reshape(-1, value.shape[-1]))
    sums = first.clone(memory_format=torch.contiguous_format)
    for block in range(blocks):
        local = means[:, block].clone()
        torch.mul(sums, inverse[:, block, :, None], out=means[:, block])
        sums += local
    return means, sums


@code_means_op.register_fake
def _(value, rows, inverse, first):
    means = value.new_empty(*rows.shape[:2], *first.shape[1:])
    return means, first.new_empty(first.shape)


@torch.library.custom_op("keras_efficient_attn::code_means_grad", mutates_args=())
def code_means_grad_op(
    grad_means: Tensor, grad_sums: Tensor, rows: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the value and of the first sums of `code_means_op`."""
    grad_sums = grad_sums.clone(memory_format=torch.contiguous_format)
    batch, number, dim = grad_sums.shape
    places = number * torch.arange(batch).view(batch, 1, 1) + rows
    grad_value = grad_sums.new_empty(*rows.shape, dim)
    for block in reversed(range(rows.shape[1])):
        chosen = grad_sums.view(-1, dim).index_select(0, places[:, block].flatten())
        grad_value[:, block] = chosen.view(batch, -1, dim)
        grad_sums.addcmul_(grad_means[:, block], inverse[:, block, :, None])
    return grad_value, grad_sums


@code_means_grad_op.register_fake
def _(grad_means, grad_sums, rows, inverse):
    grad_value = grad_sums.new_empty(*rows.shape, grad_sums.shape[-1])
    return grad_value, grad_sums.new_empty(grad_sums.shape)


def _keep_for_backward(ctx, inputs, output):
    _, rows, inverse, _ = inputs
    ctx.save_for_backward(rows, inverse)


def _differentiate(ctx, grad_means, grad_sums):
    refuse_second_derivatives()
    grad_value, grad_first = code_means_grad_op(
        grad_means, grad_sums, *ctx.saved_tensors
    )
    return grad_value, None, None, grad_first


code_means_op.register_autograd(_differentiate, setup_context=_keep_for_backward)
