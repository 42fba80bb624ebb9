"""Softmax attention in blocks by PyTorch's fused kernel for CPUs.

The kernel of `scaled_dot_product_attention` writes no matrix of weights, forward or
backward. It reads blocks in place, and its log-sum-exp is the scale of a part. A part
is one differentiable operation of PyTorch, opaque to `torch.compile`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from keras_efficient_attn.ops.common.backend import is_traced_by_torch
from keras_efficient_attn.ops.common.fused_cuts_torch import make_cuts, mask_words
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_band(query, key, value, valid, mask_fn, start=None):
    """Computes `block_softmax.attend_near` or, with a `start`, `attend_recent`.

    `mask_fn` is an `IntervalMask`.
    """
    tensors = [] if start is None else [torch.as_tensor(start)]
    return _part("band", query, key, value, valid, tensors, mask_fn)


def attend_blocks(query, key, value, valid, mask_fn, positions):
    """Computes `block_softmax.attend_blocks`."""
    batch, blocks = query.shape[:2]
    i, j = positions
    allowed = mask_fn(i[..., :, None], j[..., None, :])
    if allowed.ndim == 3:
        allowed = allowed.expand(batch, -1, -1, -1).flatten(0, 1)
    inputs = (t.flatten(0, 1) for t in (query, key, value, valid))
    part = _part("blocks", *inputs, [allowed])
    return tuple(t.unflatten(0, (batch, blocks)) for t in part)


def attend_shared(query, key, value, valid, mask_fn, positions):
    """Computes `block_softmax.attend_shared`."""
    return _part("shared", query, key, value, valid, list(positions), mask_fn)


def attend_weighted(query, key, value, log_weight):
    """Partial softmax over weighted keys.

    Args:
        query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, keys, heads, dim)`, finite.
        log_weight: `(batch, heads, keys)`, added to the logits; without a gradient.

    Returns:
        As `block_softmax.attend_shared`.
    """
    return _part("weighted", query, key, value, None, [log_weight])


def attend_codes(query, key, value, codes, causal):
    """Partial softmax over the other positions whose code a query sees in any round.

    Args:
        query, key: `(batch, length, heads, dim)`, the query scaled.
        value: `(batch, length, heads, value_dim)`.
        codes: Integers `(batch, heads, rounds, length)`: the code of a position, which
            its query sees; and another code that its query sees.
        causal: Whether a query sees only positions before its own.

    Returns:
        As `block_softmax.attend_shared`.
    """
    kind = "earlier codes" if causal else "codes"
    return _part(kind, query, key, value, None, list(codes))


def _part(kind, query, key, value, valid, tensors, mask_fn=None):
    dim, value_dim = key.shape[-1], value.shape[-1]
    largest = max(dim, value_dim)
    # The kernel needs heads of equal size.
    query, key, value = (
        torch.nn.functional.pad(t, (0, largest - t.shape[-1])) if largest > n else t
        for t, n in ((query, dim), (key, dim), (value, value_dim))
    )
    mask = "" if mask_fn is None else mask_words(mask_fn)
    attend = attend_op if is_traced_by_torch() else _Attention.apply
    output, log_scale = attend(query, key, value, valid, tensors, kind, mask)
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
        key, value: `(batch, keys, heads, dim)`.
        valid: Mask of the keys that exist: `(batch, keys)` or `(batch, keys, heads)`.
        tensors: Tensors of the kind: the position of the first query, or nothing
            (`"band"`); the mask of visible keys (`"blocks"`); positions of queries and
            keys (`"shared"`); log weights (`"weighted"`); or the `codes` of
            `attend_codes` (`"codes"`, and `"earlier codes"` if causal).
        kind: One of these names.
        mask: `mask_words` of the mask function, if the kind has one.

    Returns:
        The output, and the log of the sum of all weights, of every query.
    """
    return _forward(
        query, key, value, valid, make_cuts(query, key, tensors, kind, mask)
    )


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
    cuts = make_cuts(*inputs[:2], tensors, kind, mask)
    return _backward(grad_output, grad_scale, outputs, inputs, valid, cuts)


@attend_grad_op.register_fake
def _(grad_output, grad_scale, outputs, inputs, *_):
    return tuple(x.new_empty(x.shape) for x in inputs)


def _keep_for_backward(ctx, inputs, output):
    query, key, value, valid, tensors, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, valid, *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_output, grad_scale):
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
    def forward(ctx, query, key, value, valid, tensors, kind, mask):
        ctx.cuts = make_cuts(query, key, tensors, kind, mask)
        outputs = _forward(query, key, value, valid, ctx.cuts)
        ctx.save_for_backward(query, key, value, valid, *outputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_scale):
        query, key, value, valid, *outputs = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(outputs[0])
        inputs = query, key, value
        grads = _backward(grad_output, grad_scale, outputs, inputs, valid, ctx.cuts)
        return *grads, None, None, None, None


def _forward(query, key, value, valid, cuts):
    query, key, value = map(_with_whole_vectors, (query, key, value))
    parts = (
        _attend(
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
        _attend_backward(
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
