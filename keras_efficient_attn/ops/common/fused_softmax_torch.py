"""Softmax attention in blocks by PyTorch's fused kernel for CPUs.

The kernel of `scaled_dot_product_attention` writes no matrix of weights, forward or
backward. It reads blocks where they are in the sequence, and its log-sum-exp is the
scale of a part.
"""

import dataclasses

import torch

from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.plan import device_plan

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_band(query, key, value, valid, mask_fn, start=None):
    """As `block_softmax.attend_near` or, with a `start`, `attend_recent`.

    `mask_fn` is an `IntervalMask`.
    """
    (batch, length), keys, period = query.shape[:2], key.shape[1], mask_fn.period
    # How far a block sees back, and how many keys are before the first query.
    before, earlier = mask_fn.before, 0
    if start is not None:
        before = earlier = mask_fn.reach
    start = 0 if start is None else int(start)
    # A wide band is worth larger blocks: their keys overlap less.
    block = max(device_plan().block, (before + mask_fn.after) // 8)
    block = max(1, block // period) * period
    width = before + block + mask_fn.after

    def cut(number, count=1, row=None):
        first = number * block
        first_key = first + earlier - before
        last_key = min(first_key + width, keys)
        first_key = max(first_key, 0)
        size, wide = min(block, length - first), last_key - first_key
        i = start + first + torch.arange(size)[:, None]
        j = start - earlier + first_key + torch.arange(wide)
        mask = _mask(mask_fn(i, j)[None, None], query.dtype)
        return _Cut(*mask, (first, size), (first_key, wide), block, count, row)

    blocks = -(-length // block)
    # Blocks whose keys all exist have the same mask.
    first = min(-(-max(before - earlier, 0) // block), blocks)
    last = min(length // block, (keys - earlier - mask_fn.after) // block)
    if last - first > batch:
        cuts = [cut(first, last - first, row) for row in range(batch)]
        edges = [*range(first), *range(last, blocks)]
    else:
        cuts, edges = [], range(blocks)
    cuts += [cut(number) for number in edges]
    return _part(query, key, value, valid, cuts)


def attend_blocks(query, key, value, valid, mask_fn, positions):
    """As `block_softmax.attend_blocks`."""
    batch, blocks, size = query.shape[:3]
    i, j = positions
    allowed = mask_fn(i[..., :, None], j[..., None, :])
    if allowed.ndim == 3:
        allowed = allowed.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
    else:
        allowed = allowed[None, None]
    inputs = (t.flatten(0, 1) for t in (query, key, value, valid))
    cut = _Cut(*_mask(allowed, query.dtype), (0, size), (0, key.shape[2]))
    part = _part(*inputs, [cut])
    return tuple(t.unflatten(0, (batch, blocks)) for t in part)


def attend_shared(query, key, value, valid, mask_fn, positions):
    """As `block_softmax.attend_shared`."""
    block, cuts = 2 * device_plan().block, []
    i, j = positions
    for first in range(0, query.shape[1], block):
        rows = i[first : first + block]
        allowed = mask_fn(rows[:, None], j[:, None])
        # Without the last keys, which often are later than all queries.
        seen = allowed.any(0).any(0).nonzero()
        last = int(seen[-1]) + 1 if len(seen) else 1
        mask = _mask(allowed[None, ..., :last], query.dtype)
        cuts.append(_Cut(*mask, (first, len(rows)), (0, last)))
    return _part(query, key, value, valid, cuts)


def attend_weighted(query, key, value, log_weight):
    """The part of a softmax over keys with weights of their own.

    Args:
        query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, keys, heads, dim)`, finite.
        log_weight: `(batch, heads, keys)`, added to the logits; without a gradient.

    Returns:
        As `block_softmax.attend_shared`.
    """
    spans = (0, query.shape[1]), (0, key.shape[1])
    cut = _Cut(log_weight[:, :, None], False, *spans)
    return _part(query, key, value, None, [cut])


def _mask(allowed, dtype):
    """A mask for the logits, and whether query `i` of a block sees keys `0..i` only."""
    lower = not allowed.triu(1).any()
    return torch.where(allowed, 0.0, LOG_ZERO).to(dtype), lower


def _part(query, key, value, valid, cuts):
    dim, value_dim = key.shape[-1], value.shape[-1]
    largest = max(dim, value_dim)
    # The kernel wants heads of one size.
    query, key, value = (_widened(t, largest) for t in (query, key, value))
    output, log_scale = _Attention.apply(query, key, value, valid, cuts)
    totals = _is_seen(log_scale).to(output.dtype)
    return output[..., :value_dim], totals, log_scale


def _widened(x, dim):
    if x.shape[-1] < dim:
        return torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_seen(log_scale):
    """Whether a query saw a key; without one, all have the same log weight."""
    return log_scale > LOG_ZERO / 2


@dataclasses.dataclass(frozen=True, eq=False)
class _Cut:
    """Blocks of queries, one after the other, and the keys that each may see.

    Attributes:
        mask: `(rows or blocks or 1, heads or 1, queries, keys)`, added to the logits.
        causal: Whether query `i` of a block sees no keys but its keys `0..i`: others
            are not computed.
        queries: The first query, and the number of queries in a block.
        keys: The same for keys.
        step: Positions between two blocks.
        count: Number of blocks.
        row: The row of the batch, if there are several blocks: of one block, all rows.
    """

    mask: torch.Tensor
    causal: bool
    queries: tuple
    keys: tuple
    step: int = 0
    count: int = 1
    row: int | None = None

    def of(self, x, span):
        """`(batch, length, heads, ...)` as `(rows or blocks, heads, span, ...)`."""
        first, size = span
        if self.row is None:
            return x[:, first : first + size].transpose(1, 2)
        x = x[self.row, first : first + (self.count - 1) * self.step + size]
        x = x.unfold(0, size, self.step)
        return x.transpose(2, 3) if x.ndim == 4 else x

    def is_whole(self, query, key):
        """Whether all queries see all keys in one block of each row."""
        spans = (0, query.shape[1]), (0, key.shape[1])
        return self.row is None and (self.queries, self.keys) == spans

    def full_mask(self, valid):
        """The mask, with the keys that do not exist, if there are any."""
        if valid is None:
            return self.mask
        valid = valid if valid.ndim == 3 else valid[..., None]
        exists = self.of(valid, self.keys)[:, :, None] > 0
        return self.mask if exists.all() else torch.where(exists, self.mask, LOG_ZERO)

    def add(self, grad, grad_keys):
        """Adds gradients of the blocks' keys, which overlap, to those of all keys."""
        first, size = self.keys
        step = self.step or size
        for start in range(0, size, step):
            span = first + start, min(step, size - start)
            piece = grad_keys[:, :, start : start + step]
            self.of(grad, span).add_(piece)


class _Attention(torch.autograd.Function):
    """The output, and the log of the sum of all weights, of every query."""

    @staticmethod
    def forward(ctx, query, key, value, valid, cuts):
        parts = (
            _attend(
                cut.of(query, cut.queries),
                cut.of(key, cut.keys),
                cut.of(value, cut.keys),
                is_causal=cut.causal,
                attn_mask=cut.full_mask(valid),
                scale=1.0,
            )
            for cut in cuts
        )
        ctx.whole, ctx.cuts = cuts[0].is_whole(query, key), cuts
        if ctx.whole:
            output, log_scale = (t.transpose(1, 2) for t in next(parts))
        else:
            output = torch.empty_like(query)
            log_scale = query.new_empty(query.shape[:3])
            for cut, part in zip(cuts, parts, strict=True):
                for whole, piece in zip((output, log_scale), part, strict=True):
                    cut.of(whole, cut.queries).copy_(piece)
        seen = _is_seen(log_scale)
        ctx.all_seen = bool(seen.all())
        if not ctx.all_seen:
            output = torch.where(seen[..., None], output, 0.0)
        ctx.save_for_backward(query, key, value, valid, output, log_scale)
        ctx.set_materialize_grads(False)
        return output, log_scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_scale):
        query, key, value, valid, output, log_scale = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        if not ctx.all_seen:
            seen = _is_seen(log_scale)
            grad_output = torch.where(seen[..., None], grad_output, 0.0)
        if grad_scale is not None:
            output = _with_scale_gradient(output, grad_output, grad_scale)
        parts = (
            _attend_backward(
                cut.of(grad_output, cut.queries),
                cut.of(query, cut.queries),
                cut.of(key, cut.keys),
                cut.of(value, cut.keys),
                cut.of(output, cut.queries),
                cut.of(log_scale, cut.queries),
                0.0,
                cut.causal,
                attn_mask=cut.full_mask(valid),
                scale=1.0,
            )
            for cut in ctx.cuts
        )
        if ctx.whole:
            return *(t.transpose(1, 2) for t in next(parts)), None, None
        grad_query, *grads = map(torch.zeros_like, (query, key, value))
        for cut, (piece, *pieces) in zip(ctx.cuts, parts, strict=True):
            cut.of(grad_query, cut.queries).copy_(piece)
            for grad, grad_keys in zip(grads, pieces, strict=True):
                cut.add(grad, grad_keys)
        return grad_query, *grads, None, None


def _with_scale_gradient(output, grad_output, grad_scale):
    """An output whose product with its gradient is less by the gradient of the scale.

    The kernel subtracts that product from the gradient of every logit, and nothing
    else reads the output: this is how it takes the gradient of its log-sum-exp. Where
    parts are merged, that gradient is 0 if the gradient of the output is.
    """
    largest = grad_output.abs().amax(-1, keepdim=True)
    # Less than this adds nothing, and its reciprocal would leave the float range.
    scale = torch.where(largest > 1e-30, 1.0 / largest, 0.0)
    direction = grad_output * scale
    square = direction.square().sum(-1, keepdim=True).clamp(min=1.0)
    return output - (grad_scale[..., None] * scale) * (direction / square)
