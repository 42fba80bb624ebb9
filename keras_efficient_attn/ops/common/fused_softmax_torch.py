"""Softmax attention in blocks by PyTorch's fused kernel for CPUs.

The kernel of `scaled_dot_product_attention` writes no matrix of weights, forward or
backward. It reads blocks in place, and its log-sum-exp is the scale of a part. A part
is one differentiable operation of PyTorch, opaque to `torch.compile`.

A step of training takes 0.50 to 0.58 of the time of blocks without it (`local` and
`sparse`), 0.77 with codes (`vq`): 4 heads of 64, 2,048 and 8,192 positions, two CPU
cores; measured by `python -m tools.compare_forms fused_softmax_torch`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from keras_efficient_attn.ops.common import masks, private_torch
from keras_efficient_attn.ops.common.backend import is_traced_by_torch
from keras_efficient_attn.ops.common.derivatives_torch import (
    refuse_second_derivatives,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.plan import block_sizes


def attend_blocks(query, key, value, valid, mask_fn, positions):
    """Computes `block_softmax.attend_blocks`."""
    batch, blocks = query.shape[:2]
    i, j, *numbers = positions
    allowed = mask_fn(i[..., :, None], j[..., None, :])
    if numbers:
        allowed &= numbers[0][..., :, None] == numbers[1][..., None, :]
    if allowed.ndim == 4:
        allowed = allowed.expand(batch, -1, -1, -1).flatten(0, 1)
    inputs = (t.flatten(0, 1) for t in (query, key, value, valid))
    part = attend("blocks", *inputs, [allowed])
    return tuple(t.unflatten(0, (batch, blocks)) for t in part)


def attend(kind, query, key, value, valid, tensors, mask_fn=None):
    """A part of a softmax: `(values, totals, log_scale)`.

    Arguments are as for `attend_op`, with a mask function of `masks`; the value may
    have another size than the key.
    """
    dim, value_dim = key.shape[-1], value.shape[-1]
    largest = max(dim, value_dim)
    # The kernel needs heads of equal size.
    query, key, value = (
        torch.nn.functional.pad(t, (0, largest - t.shape[-1])) if largest > n else t
        for t, n in ((query, dim), (key, dim), (value, value_dim))
    )
    inputs = query, key, value, valid, list(tensors), kind
    if is_traced_by_torch():
        output, log_scale = attend_op(*inputs, mask_words(mask_fn))
    else:
        output, log_scale = _Attention.apply(*inputs, mask_fn)
    totals = _is_seen(log_scale).to(output.dtype)
    return output[..., :value_dim], totals, log_scale


@torch.library.custom_op("keras_efficient_attn::attend", mutates_args=())
def attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    tensors: Sequence[Tensor],
    kind: str,
    mask: str,
) -> tuple[Tensor, Tensor]:
    """Computes a partial softmax.

    Args:
        query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, keys, heads, dim)`, finite.
        valid: Mask of the keys that exist: `(batch, keys)` or `(batch, keys, heads)`;
            `None` for the last three kinds.
        tensors: Tensors of the kind:

            - `"band"` and `"recent"`, `block_softmax.attend_near` and `attend_recent`:
              none, or for `"band"` the positions of all in their documents, and the
              documents' numbers, `(batch, length)`.
            - `"blocks"`, one block of `attend_blocks`: the mask of visible keys.
            - `"shared"`, `attend_shared`: the positions of queries and of keys.
            - `"weighted"`: `(batch, heads, keys)`, added to the logits, without a
              gradient.
            - `"codes"` and `"earlier codes"`, the other positions, or those before a
              query's own, whose code a query sees in any round: integers `(batch,
              heads, rounds, length)`, the code of a position, which its query sees; and
              another code that its query sees.

        kind: One of these names.
        mask: `mask_words` of the mask function, if the kind has one.

    Returns:
        The output, and the log of the sum of all weights, of every query.
    """
    cuts = _CUTS[kind](query, key, tensors, _mask_fn(mask))
    return _forward(query, key, value, valid, cuts)


@attend_op.register_fake
def _(query, key, value, valid, tensors, kind, mask):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3])


@torch.library.custom_op("keras_efficient_attn::attend_grad", mutates_args=())
def attend_grad_op(
    grad_output: Tensor,
    grad_scale: Tensor | None,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    valid: Tensor | None,
    tensors: Sequence[Tensor],
    kind: str,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the query, the key and the value of `attend_op`."""
    cuts = _CUTS[kind](*inputs[:2], tensors, _mask_fn(mask))
    return _backward(grad_output, grad_scale, outputs, inputs, valid, cuts)


@attend_grad_op.register_fake
def _(grad_output, grad_scale, outputs, inputs, *_):
    return tuple(x.new_empty(x.shape) for x in inputs)


def _keep_for_backward(ctx, inputs, output):
    query, key, value, valid, tensors, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, valid, *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_output, grad_scale):
    refuse_second_derivatives()
    query, key, value, valid, *outputs = ctx.saved_tensors
    outputs, tensors = outputs[:2], outputs[2:]
    if grad_output is None:
        grad_output = torch.zeros_like(outputs[0])
    inputs = [query, key, value]
    grads = attend_grad_op(
        grad_output, grad_scale, outputs, inputs, valid, tensors, *ctx.options
    )
    return *grads, None, [None] * len(tensors), None, None


attend_op.register_autograd(_differentiate, setup_context=_keep_for_backward)


class _Attention(torch.autograd.Function):
    """`attend_op` without `torch.compile`: masks, but of codes, are made only once."""

    @staticmethod
    def forward(ctx, query, key, value, valid, tensors, kind, mask_fn):
        ctx.cuts = _CUTS[kind](query, key, tensors, mask_fn)
        outputs = _forward(query, key, value, valid, ctx.cuts)
        ctx.save_for_backward(query, key, value, valid, *outputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, grad_output, grad_scale):
        refuse_second_derivatives()
        query, key, value, valid, *outputs = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(outputs[0])
        inputs = query, key, value
        grads = _backward(grad_output, grad_scale, outputs, inputs, valid, ctx.cuts)
        return *grads, None, None, None, None


def _forward(query, key, value, valid, cuts):
    query, key, value = map(_with_whole_vectors, (query, key, value))
    parts = (
        private_torch.fused_attention(
            cut.select(query, cut.queries),
            cut.select(key, cut.keys),
            cut.select(value, cut.keys),
            is_causal=cut.causal,
            attn_mask=cut.full_mask(valid),
            scale=1.0,
        )
        for cut in cuts
    )
    if cuts[0].is_whole(query, key):
        output, log_scale = (t.transpose(1, 2).contiguous() for t in next(parts))
    else:
        output = query.new_empty(query.shape)
        log_scale = query.new_empty(query.shape[:3])
        for cut, part in zip(cuts, parts, strict=True):
            for whole, piece in zip((output, log_scale), part, strict=True):
                cut.select(whole, cut.queries).copy_(piece)
    seen = _is_seen(log_scale)
    if not seen.all():
        output = torch.where(seen[..., None], output, 0.0)
    return output, log_scale


def _backward(grad_output, grad_scale, outputs, inputs, valid, cuts):
    query, key, value = map(_with_whole_vectors, inputs)
    output, log_scale = outputs
    grad_output = grad_output.contiguous()
    seen = _is_seen(log_scale)
    if not seen.all():
        grad_output = torch.where(seen[..., None], grad_output, 0.0)
    if grad_scale is not None:
        output = _with_scale_gradient(output, grad_output, grad_scale)
    parts = (
        private_torch.fused_attention_backward(
            cut.select(grad_output, cut.queries),
            cut.select(query, cut.queries),
            cut.select(key, cut.keys),
            cut.select(value, cut.keys),
            cut.select(output, cut.queries),
            cut.select(log_scale, cut.queries),
            0.0,
            cut.causal,
            attn_mask=cut.full_mask(valid),
            scale=1.0,
        )
        for cut in cuts
    )
    if cuts[0].is_whole(query, key):
        return tuple(t.transpose(1, 2).contiguous() for t in next(parts))
    grad_query, *grads = (t.new_zeros(t.shape) for t in (query, key, value))
    for cut, (piece, *pieces) in zip(cuts, parts, strict=True):
        cut.select(grad_query, cut.queries).copy_(piece)
        for grad, grad_keys in zip(grads, pieces, strict=True):
            cut.add(grad, grad_keys)
    return grad_query, *grads


def _with_whole_vectors(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_seen(log_scale):
    """Whether a query saw a key; otherwise all keys have the same log weight."""
    return log_scale > LOG_ZERO / 2


def _with_scale_gradient(output, grad_output, grad_scale):
    """An output whose product with its gradient is reduced by the scale's gradient.

    The kernel subtracts that product from the gradient of every logit and reads the
    output nowhere else. This adds the gradient of its log-sum-exp. When parts are
    merged, that gradient is 0 if the output's gradient is 0.
    """
    largest = grad_output.abs().amax(-1, keepdim=True)
    # Smaller values add nothing, and their reciprocal would overflow.
    scale = torch.where(largest > 1e-30, 1.0 / largest, 0.0)
    direction = grad_output * scale
    square = direction.square().sum(-1, keepdim=True).clamp(min=1.0)
    return output - (grad_scale[..., None] * scale) * (direction / square)


def mask_words(mask_fn):
    """The name of a mask function of `masks`, and its fields as integers.

    An operation of PyTorch takes no other objects. `None` has no words.
    """
    if mask_fn is None:
        return ""
    fields = (getattr(mask_fn, name) for name in mask_fn.__dataclass_fields__)
    return " ".join([type(mask_fn).__name__, *(f"{int(field)}" for field in fields)])


def _mask_fn(words):
    if not words:
        return None
    name, *numbers = words.split()
    return getattr(masks, name)(*map(int, numbers))


def _band_cuts(query, key, tensors, mask_fn, recent=False):
    (batch, length), keys, period = query.shape[:2], key.shape[1], mask_fn.period
    # The reach of a block, and the number of keys before the first query.
    before, after, earlier = mask_fn.before, mask_fn.after, 0
    if recent:
        before = earlier = mask_fn.reach
    places = [x[..., None] for x in tensors]
    if places:
        # Documents begin anywhere in a period.
        before, after = (reach + period - 1 for reach in (before, after))
    # A wide band justifies larger blocks, whose keys overlap less.
    block = max(block_sizes().block, (before + after) // 8)
    block = max(1, block // period) * period
    # The kernel is faster at numbers of keys that fill its vectors.
    before += -(before + block + after) % 16
    width = before + block + after

    def cut(number, count=1, row=None):
        first = number * block
        first_key = first + earlier - before
        last_key = min(first_key + width, keys)
        first_key = max(first_key, 0)
        size, wide = min(block, length - first), last_key - first_key
        spans = (first, size), (first_key, wide)
        if places:
            own = Cut(None, False, *spans, block, count, row)
            i, j, *numbers = (own.select(x, span) for x in places for span in spans)
            allowed = mask_fn(i[..., :, None], j[..., None, :])
            allowed &= numbers[0][..., :, None] == numbers[1][..., None, :]
        else:
            i = first + torch.arange(size)[:, None]
            j = first_key - earlier + torch.arange(wide)
            allowed = mask_fn(i, j)[None, None]
        return Cut(*_mask(allowed, query.dtype), *spans, block, count, row)

    blocks = -(-length // block)
    # Blocks whose keys all exist have the same mask.
    first = min(-(-max(before - earlier, 0) // block), blocks)
    last = min(length // block, (keys - earlier - after) // block)
    if last - first > batch:
        cuts = [cut(first, last - first, row) for row in range(batch)]
        edges = [*range(first), *range(last, blocks)]
    else:
        cuts, edges = [], range(blocks)
    return cuts + [cut(number) for number in edges]


def _shared_cuts(query, key, tensors, mask_fn):
    i, j = tensors
    block, cuts = 2 * block_sizes().block, []
    for first in range(0, query.shape[1], block):
        rows = i[first : first + block]
        allowed = mask_fn(rows[:, None], j[:, None])
        # Drop the last keys, which are often later than all queries.
        seen = allowed.any(0).any(0).nonzero()
        last = int(seen[-1]) + 1 if len(seen) else 1
        mask = _mask(allowed[None, ..., :last], query.dtype)
        cuts.append(Cut(*mask, (first, len(rows)), (0, last)))
    return cuts


def _block_cuts(query, key, tensors, mask_fn):
    allowed = tensors[0]
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed[None, None]
    return [Cut(*_mask(allowed, query.dtype), (0, query.shape[1]), (0, key.shape[1]))]


def _weighted_cuts(query, key, tensors, mask_fn):
    weights = tensors[0][:, :, None]
    return [Cut(weights, False, (0, query.shape[1]), (0, key.shape[1]))]


def _code_cuts(query, key, codes, mask_fn, earlier=False):
    """Blocks of one row each, whose masks are small."""
    if max(int(code.max()) for code in codes) < 2**15:
        # Narrow integers are compared faster.
        codes = [code.to(torch.int16) for code in codes]
    (batch, length), block, cuts = query.shape[:2], 4 * block_sizes().block, []
    for row in range(batch):
        code, before = (code[row] for code in codes)
        for first in range(0, length, block):
            size = min(block, length - first)
            keys = first + size if earlier else length
            spans = (first, size), (0, keys)
            ids = code, before, earlier, query.dtype
            cuts.append(CodeCut(None, False, *spans, keys, 1, row, *ids))
    return cuts


# The `Cut`s of each kind of call of `attend_op`, from its arguments.
_CUTS = {
    "band": _band_cuts,
    "recent": functools.partial(_band_cuts, recent=True),
    "blocks": _block_cuts,
    "shared": _shared_cuts,
    "weighted": _weighted_cuts,
    "codes": _code_cuts,
    "earlier codes": functools.partial(_code_cuts, earlier=True),
}


def _mask(allowed, dtype):
    """A mask for the logits, and whether query `i` of a block sees keys `0..i` only."""
    lower = not allowed.triu(1).any()
    return torch.where(allowed, 0.0, LOG_ZERO).to(dtype), lower


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Consecutive blocks of queries, and the keys that each may see.

    Attributes:
        mask: `(rows or blocks or 1, heads or 1, queries, keys)`, added to the logits.
        causal: Whether query `i` of a block sees only keys `0..i`; other pairs are not
            computed.
        queries: The first query, and the number of queries per block.
        keys: The first key, and the number of keys per block.
        step: Distance between consecutive blocks.
        count: Number of blocks.
        row: The row of the batch, if there are several blocks; a single block has all
            rows.
    """

    mask: torch.Tensor
    causal: bool
    queries: tuple
    keys: tuple
    step: int = 0
    count: int = 1
    row: int | None = None

    def select(self, x, span):
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
        """The mask, combined with missing keys if there are any."""
        if valid is None:
            return self.mask
        valid = valid if valid.ndim == 3 else valid[..., None]
        exists = self.select(valid, self.keys)[:, :, None] > 0
        return self.mask if exists.all() else torch.where(exists, self.mask, LOG_ZERO)

    def add(self, grad, grad_keys):
        """Adds gradients of overlapping blocks of keys to those of all keys."""
        first, size = self.keys
        step = self.step or size
        for start in range(0, size, step):
            span = first + start, min(step, size - start)
            piece = grad_keys[:, :, start : start + step]
            self.select(grad, span).add_(piece)


@dataclasses.dataclass(frozen=True, eq=False)
class CodeCut(Cut):
    """A block of queries that see other positions by their codes.

    The mask is made for each use: all masks together hold every pair.

    Attributes:
        code: Integers `(heads, rounds, length)`: the code that a position has, and
            sees.
        before: A second code that it sees.
        earlier: Whether it sees earlier positions only.
        dtype: Of the mask.
    """

    code: torch.Tensor | None = None
    before: torch.Tensor | None = None
    earlier: bool = False
    dtype: torch.dtype = torch.float32

    def full_mask(self, valid):
        first, size = self.queries
        i, j = torch.arange(first, first + size)[:, None], torch.arange(self.keys[1])
        seen = torch.zeros((), dtype=torch.bool)
        for r in range(self.code.shape[1]):
            key_codes = self.code[:, r, None, : len(j)]
            for codes in self.code, self.before:
                query_codes = codes[:, r, first : first + size, None]
                seen = seen | (key_codes == query_codes)
        seen = seen & (j < i if self.earlier else j != i)
        return torch.where(seen[None], 0.0, LOG_ZERO).to(self.dtype)
