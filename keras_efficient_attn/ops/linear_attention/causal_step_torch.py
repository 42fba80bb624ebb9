"""`causal_step` for PyTorch: the same sums, in few passes and in place.

In eager mode, the cost of operations is their memory traffic. So products are
accumulated in place, triangles are masked in place, and tensors keep one layout,
`(batch · heads · chunks, chunk_size, dim)`, which matrix products read directly.
"""

import functools
import math

import torch

from keras_efficient_attn.ops.linear_attention.keys import sum_of_scales
from keras_efficient_attn.ops.linear_attention.steps import step_and_gradient


# Bounded: users may create functions.
@functools.lru_cache(256)
def causal_step(config, chunk_size, masked):
    """Computes `causal_step.causal_step`; call it without gradient recording."""

    def split(x, dtype):
        return _by_head(x.to(getattr(torch, dtype)), chunk_size)

    steps = step_and_gradient(config, masked, split, _Chunks)
    return tuple(map(_without_autocast, steps))


def _without_autocast(function):
    """Keeps all products in the accumulator's dtype."""

    @functools.wraps(function)
    def call(carry, *arguments):
        with torch.autocast(carry[0].device.type, enabled=False):
            return function(carry, *arguments)

    return call


def _by_head(x, chunk_size):
    """`(batch, group, heads, ...)` as `(batch, heads, chunks, chunk_size, ...)`."""
    chunks = x.shape[1] // chunk_size
    return x.transpose(1, 2).contiguous().unflatten(2, (chunks, chunk_size))


class _Chunks:
    """A group of chunks: scores, and states before each chunk as queries read them."""

    def __init__(self, carry, query, key, value, log_weight, query_log_scale):
        self.batch, self.heads, self.chunks = query.shape[:3]
        sums, normalizer, log_scale = carry
        self.query, self.key, self.value = (
            t.flatten(0, 2) for t in (query, key, value)
        )
        self.scores = torch.bmm(self.query, self.key.mT)
        self.far_query, self.far_key = self.query, self.key
        self.log_weight, self.query_log_scale = log_weight, query_log_scale
        self.scale = None
        if log_weight is None:
            self.scores.tril_()
            ones = torch.ones(
                self.chunks + 1, self.chunks + 1, dtype=key.dtype, device=key.device
            )
            self.weights = ones.tril_().expand(self.batch * self.heads, -1, -1)
        else:
            log_scale = self._weigh(log_scale, log_weight)
        local = torch.bmm(self.far_key.mT, self.value)
        self.before, sums = self._prefix_sums(sums, local)
        self.before_normalizer, normalizer = self._prefix_sums(
            normalizer, self.far_key.sum(-2)
        )
        self.carry = sums, normalizer, log_scale

    def _weigh(self, log_scale, log_weight):
        """Weighs scores, keys and queries; returns the log scale after the chunks."""
        chunk_max = log_weight.amax(-1)
        maxima = torch.cat([log_scale[..., None], chunk_max], -1)
        running = maxima.cummax(-1).values
        # The maxima over exactly the state and the keys that each query may see. Other
        # differences may be large: clip them before the exponential.
        weights = maxima[..., None, :] - running[..., None]
        self.weights = weights.clamp_(max=0.0).exp_().tril_().flatten(0, 1)
        state_max = running[..., :-1, None]
        self.scale = torch.maximum(log_weight.cummax(-1).values, state_max)
        factors = log_weight[..., None, :] - self.scale[..., None]
        self.factors = factors.clamp_(max=0.0).exp_().tril_().flatten(0, 2)
        self.scores.mul_(self.factors)
        self.key_factors = (log_weight - chunk_max[..., None]).exp_().flatten(0, 2)
        self.key_factors = self.key_factors[..., None]
        self.query_factors = (state_max - self.scale).exp_().flatten(0, 2)[..., None]
        self.far_key = self.key * self.key_factors
        self.far_query = self.query * self.query_factors
        return running[..., -1]

    def _prefix_sums(self, first, local):
        """States before each chunk, and the state after the last."""
        rows = self.batch * self.heads
        size = math.prod(local.shape[1:])
        state = first.reshape(rows, 1, size)
        states = local.view(rows, self.chunks, size)
        by_first, by_local = self.weights[..., :1], self.weights[..., 1:]
        before = torch.baddbmm(by_first[:, :-1] * state, by_local[:, :-1], states)
        last = torch.baddbmm(by_first[:, -1:] * state, by_local[:, -1:], states)
        return before.view(local.shape), last.view(first.shape)

    def _prefix_sums_gradient(self, grad_before, grad_last):
        """Gradients of `first` and of `local`."""
        rows = self.batch * self.heads
        size = math.prod(grad_before.shape[1:])
        last = grad_last.reshape(rows, 1, size)
        states = grad_before.view(rows, self.chunks, size)
        weights = self.weights.mT
        by_before, by_last = weights[..., :-1], weights[..., -1:]
        grad_first = torch.baddbmm(by_last[:, :1] * last, by_before[:, :1], states)
        grad_local = torch.baddbmm(by_last[:, 1:] * last, by_before[:, 1:], states)
        return grad_first.view(grad_last.shape), grad_local.view(grad_before.shape)

    def totals(self):
        far = torch.bmm(self.far_query, self.before_normalizer[..., None])
        return far[..., 0].add_(self.scores.sum(-1))

    def outputs(self, output):
        """A tuple of tensors, batch and positions first."""
        values = torch.bmm(self.scores, self.value)
        values.baddbmm_(self.far_query, self.before)
        scale = sum_of_scales(self.scale, self.query_log_scale)
        scale = None if scale is None else scale.flatten(0, 2)
        if output == "normalized":
            outputs = (values.mul_(_reciprocal(self.totals())[..., None]),)
        elif output == "sum":
            if scale is not None:
                values.mul_(scale.exp()[..., None])
            outputs = (values,)
        else:
            totals = self.totals()
            scale = torch.zeros_like(totals) if scale is None else scale
            outputs = values, totals, scale
        return tuple(map(self._by_position, outputs))

    def _by_position(self, x):
        """A tensor in the layout of the sums as `(batch, group, heads, ...)`."""
        group = self.chunks * x.shape[1]
        x = x.view(self.batch, self.heads, group, *x.shape[2:])
        return x.transpose(1, 2)

    def gradient(self, y, y_gradient, carry_gradient, output):
        """Gradients of the carry and of the chunks' inputs."""
        grad_values, grad_totals, grad_query_log_scale = _outputs_gradient(
            self, y, y_gradient, output
        )
        grad_scores = torch.bmm(grad_values, self.value.mT)
        grad_far_query = torch.bmm(grad_values, self.before.mT)
        grad_before = torch.bmm(self.far_query.mT, grad_values)
        grad_before_normalizer = torch.zeros_like(self.before_normalizer)
        if grad_totals is not None:
            column = grad_totals[..., None]
            grad_scores.add_(column)
            grad_far_query.addcmul_(column, self.before_normalizer[:, None])
            grad_before_normalizer = torch.bmm(self.far_query.mT, column)[..., 0]
        grad_sums, grad_local = self._prefix_sums_gradient(
            grad_before, carry_gradient[0]
        )
        grad_normalizer, grad_local_normalizer = self._prefix_sums_gradient(
            grad_before_normalizer, carry_gradient[1]
        )
        grad_value = torch.bmm(self.scores.mT, grad_values)
        grad_value.baddbmm_(self.far_key, grad_local)
        grad_far_key = torch.bmm(self.value, grad_local.mT)
        grad_far_key.add_(grad_local_normalizer[:, None])
        grad_log_weight = None
        if self.log_weight is None:
            grad_scores.tril_()
        else:
            # Above the diagonal, scores and factors are zero.
            grad_log_weight = (grad_scores * self.scores).sum(-2)
            grad_log_weight.add_((grad_far_key * self.far_key).sum(-1))
            grad_scores.mul_(self.factors)
            grad_far_query.mul_(self.query_factors)
            grad_far_key.mul_(self.key_factors)
        grad_query = grad_far_query.baddbmm_(grad_scores, self.key)
        grad_key = grad_far_key.baddbmm_(grad_scores.mT, self.query)
        grad_carry = grad_sums, grad_normalizer, torch.zeros_like(carry_gradient[2])
        grad_inputs = (
            None if t is None else t.unflatten(0, (self.batch, self.heads, self.chunks))
            for t in (grad_query, grad_key, grad_value, grad_log_weight)
        )
        return grad_carry, *grad_inputs, grad_query_log_scale


def _reciprocal(totals):
    """Computes `online_softmax.reciprocal`."""
    least = 1e-290 if totals.dtype == torch.float64 else 1e-30
    hidden = totals.abs() <= least
    return totals.reciprocal().masked_fill_(hidden, 0.0)


def _outputs_gradient(chunks, y, y_gradient, output):
    """Gradients of values, totals and the queries' log scales; `None` for zero."""
    chunk_size = chunks.query.shape[1]
    grad_y = _by_head(y_gradient[0], chunk_size).flatten(0, 2)
    if output == "partial":
        grad_totals, grad_scale = (_by_head(t, chunk_size) for t in y_gradient[1:])
        scaled = chunks.query_log_scale is not None
        return grad_y, grad_totals.flatten(0, 2), grad_scale if scaled else None
    along = _by_head((y_gradient[0] * y[0]).sum(-1), chunk_size)
    if output == "normalized":
        inverse = _reciprocal(chunks.totals())
        grad_totals = along.flatten(0, 2).mul_(inverse).neg_()
        return grad_y * inverse[..., None], grad_totals, None
    scale = sum_of_scales(chunks.scale, chunks.query_log_scale)
    if scale is not None:
        grad_y = grad_y * scale.flatten(0, 2).exp()[..., None]
    return grad_y, None, None if chunks.query_log_scale is None else along
