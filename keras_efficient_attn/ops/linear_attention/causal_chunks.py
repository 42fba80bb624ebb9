"""The sums of causal linear attention over a group of chunks, and their gradient.

For TensorFlow and JAX; PyTorch has its own, with the same formulae.

With features Q and K, values V and, per key, a log weight l, chunk c gives

```
A         = tril(Q Kᵀ) ∘ exp(l[s] − scale[t])
values    = A V + exp(M[c] − scale) ∘ (Q S[c])
total     = A 1 + exp(M[c] − scale) ∘ (Q z[c])
```

where `S[c] = Σ exp(l[s] − M[c]) K[s]ᵀ V[s]` and `z[c] = Σ exp(l[s] − M[c]) K[s]` sum
over the keys before the chunk, and `M` is the running maximum of their log weights.
`scale` is the maximum over exactly the keys that a query may see. It cancels in `values
/ total`, so nothing overflows, no feature needs an epsilon, and the past is exactly
independent of the future.
"""

import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    columns,
    lower_triangle,
    sizes,
)
from keras_efficient_attn.ops.common.numerics import larger, max_along, where
from keras_efficient_attn.ops.common.online_softmax import (
    LOG_ZERO,
    divide,
    reciprocal,
    sum_of_scales,
)


class Chunks:
    """A group of chunks: scores, and states before each chunk as queries read them.

    Made of the carry of the scan; of queries, keys, values, log weights of keys and log
    scales of queries, by head; and of `ChunkMasks` or `None`: queries then see, and
    states sum over, the keys of their own document only.

    Attributes:
        scores: A of the formulae, `(batch, heads, chunks, chunk_size, chunk_size)`.
        scale: Log scale of the scores, `(batch, heads, chunks, chunk_size)`, or `None`
            for 0.
        far_query, far_key: Queries scaled for reading states, keys scaled for writing
            them.
        before, before_normalizer: States before each chunk.
        weights: `(batch, heads, chunks + 1, chunks + 1)`; see `_prefix_weights`.
        carry: The state after the last chunk.
    """

    def __init__(self, carry, query, key, value, log_weight, query_log_scale, masks):
        sums, normalizer, log_scale = carry
        log_scale = ops.stop_gradient(log_scale)
        self.query, self.key, self.value = query, key, value
        self.scores = query @ ops.swapaxes(key, -1, -2)
        self.far_query, self.far_key = query, key
        self.log_weight, self.query_log_scale = log_weight, query_log_scale
        self.scale, self.masks = None, masks
        if log_weight is None:
            self.scores = self._hide_scores(self.scores)
            batch, heads, chunks = sizes(query)[:3]
            seen = lower_triangle(chunks + 1) if masks is None else masks.chain
            weights = ops.cast(seen, query.dtype)
            self.weights = ops.broadcast_to(
                weights, (shape_of(query)[0], heads, chunks + 1, chunks + 1)
            )
            if masks is not None:
                self.query_factors, self.key_factors = (
                    ops.cast(mask, query.dtype)[..., None]
                    for mask in (masks.reads, masks.last)
                )
                self.far_query = query * self.query_factors
                self.far_key = key * self.key_factors
        else:
            log_scale = self._weigh(log_scale, log_weight)
        local = ops.swapaxes(self.far_key, -1, -2) @ value
        self.before, sums = _prefix_sums(sums, local, self.weights)
        local = ops.sum(self.far_key, axis=-2)
        self.before_normalizer, normalizer = _prefix_sums(
            normalizer, local, self.weights
        )
        self.carry = sums, normalizer, log_scale

    def _hide_scores(self, scores):
        """Scores, 0 for keys of the chunk that a query does not see."""
        if self.masks is None:
            return ops.tril(scores)
        return ops.where(self.masks.near, scores, 0.0)

    def _weigh(self, log_scale, log_weight):
        """Weighs scores, keys and queries; returns the log scale after the chunks."""
        masks = self.masks
        if masks is None:
            before = lower_triangle(shape_of(log_weight)[2] + 1)
            near = lower_triangle(shape_of(self.query)[3])
            far_weight = log_weight
        else:
            before, near = masks.chain, masks.near
            far_weight = where(masks.last, log_weight, LOG_ZERO)
        chunk_max = max_along(ops.stop_gradient(far_weight), -1, initial=LOG_ZERO)
        # The maxima over exactly the state and the keys that each query may see.
        state_max, self.weights = _prefix_weights(log_scale, chunk_max, before)
        after, state_max = state_max[..., -1], state_max[..., :-1, None]
        if masks is not None:
            state_max = where(masks.reads, state_max, LOG_ZERO)
        seen = ops.stop_gradient(log_weight)[..., None, :]
        seen = where(near, seen, LOG_ZERO)
        self.scale = larger(max_along(seen, axis=-1, initial=LOG_ZERO), state_max)
        shifted = log_weight[..., None, :] - self.scale[..., None]
        # For other keys the shift may be large: clip before the exponential.
        shifted = where(near, shifted, LOG_ZERO)
        self.factors = ops.where(near, ops.exp(shifted), 0.0)
        self.scores = self.scores * self.factors
        self.key_factors = ops.exp(far_weight - chunk_max[..., None])[..., None]
        query_factors = ops.exp(state_max - self.scale)
        if masks is not None:
            query_factors = ops.where(masks.reads, query_factors, 0.0)
            last = masks.last[..., None]
            self.key_factors = ops.where(last, self.key_factors, 0.0)
        self.query_factors = query_factors[..., None]
        self.far_key = self.key * self.key_factors
        self.far_query = self.query * self.query_factors
        return after

    def totals(self):
        far = self.far_query @ self.before_normalizer[..., None]
        return ops.sum(self.scores, axis=-1) + far[..., 0]

    def outputs(self, output):
        """A tuple of tensors, batch and positions first."""
        values = self.scores @ self.value + self.far_query @ self.before
        scale = sum_of_scales(self.scale, self.query_log_scale)
        if output == "normalized":
            outputs = (divide(values, self.totals()),)
        elif output == "sum":
            outputs = (values if scale is None else values * ops.exp(scale)[..., None],)
        else:
            totals = self.totals()
            scale = ops.zeros_like(totals) if scale is None else scale
            outputs = values, totals, scale
        return tuple(by_position(t) for t in outputs)

    def gradient(self, y, y_gradient, carry_gradient, output):
        """Gradients of the carry and of the chunks' inputs."""
        grad_values, grad_totals, grad_query_log_scale = _outputs_gradient(
            self, y, y_gradient, output
        )
        grad_scores = grad_values @ ops.swapaxes(self.value, -1, -2)
        grad_far_query = grad_values @ ops.swapaxes(self.before, -1, -2)
        grad_before = ops.swapaxes(self.far_query, -1, -2) @ grad_values
        grad_before_normalizer = ops.zeros_like(self.before_normalizer)
        if grad_totals is not None:
            column = grad_totals[..., None]
            grad_scores = grad_scores + column
            grad_far_query = (
                grad_far_query + column * self.before_normalizer[..., None, :]
            )
            grad_before_normalizer = ops.swapaxes(self.far_query, -1, -2) @ column
            grad_before_normalizer = grad_before_normalizer[..., 0]
        grad_sums, grad_local = _prefix_sums_gradient(
            grad_before, carry_gradient[0], self.weights
        )
        grad_normalizer, grad_local_normalizer = _prefix_sums_gradient(
            grad_before_normalizer, carry_gradient[1], self.weights
        )
        grad_value = (
            ops.swapaxes(self.scores, -1, -2) @ grad_values + self.far_key @ grad_local
        )
        grad_far_key = (
            self.value @ ops.swapaxes(grad_local, -1, -2)
            + grad_local_normalizer[..., None, :]
        )
        grad_log_weight = None
        if self.log_weight is None:
            grad_scores = self._hide_scores(grad_scores)
        else:
            # For keys that are not seen, scores and factors are zero.
            grad_log_weight = ops.sum(grad_scores * self.scores, axis=-2) + ops.sum(
                grad_far_key * self.far_key, axis=-1
            )
            grad_scores = grad_scores * self.factors
        if self.log_weight is not None or self.masks is not None:
            grad_far_query = grad_far_query * self.query_factors
            grad_far_key = grad_far_key * self.key_factors
        grad_query = grad_scores @ self.key + grad_far_query
        grad_key = ops.swapaxes(grad_scores, -1, -2) @ self.query + grad_far_key
        grad_carry = grad_sums, grad_normalizer, ops.zeros_like(carry_gradient[2])
        grad_inputs = grad_query, grad_key, grad_value, grad_log_weight
        return grad_carry, *grad_inputs, grad_query_log_scale


def _outputs_gradient(chunks, y, y_gradient, output):
    """Gradients of values, totals and the queries' log scales; `None` for zero."""
    chunk_size = shape_of(chunks.query)[3]
    grad_y = by_head(y_gradient[0], chunk_size)
    if output == "partial":
        grad_totals, grad_scale = (
            by_head(columns(t), chunk_size)[..., 0] for t in y_gradient[1:]
        )
        scaled = chunks.query_log_scale is not None
        return grad_y, grad_totals, grad_scale if scaled else None
    # A product with ones: on a CPU, XLA is ten times slower at sums of products.
    ones = ops.ones((shape_of(y[0])[-1], 1), grad_y.dtype)
    along = by_head((y_gradient[0] * y[0]) @ ones, chunk_size)[..., 0]
    if output == "normalized":
        inverse = reciprocal(chunks.totals())
        return grad_y * inverse[..., None], -along * inverse, None
    scale = sum_of_scales(chunks.scale, chunks.query_log_scale)
    grad_values = grad_y if scale is None else grad_y * ops.exp(scale)[..., None]
    return grad_values, None, None if chunks.query_log_scale is None else along


def _prefix_weights(log_scale, chunk_max, lower):
    """Running maxima, and the weights that rescale earlier chunks to them.

    `lower` is the `lower_triangle` of as many rows as chunks, and the state; or the
    chunks of the document before each of them. Returns
    `(batch, heads, chunks + 1)` maxima over the state and the chunks before each chunk
    (the last: after all), and `(batch, heads, chunks + 1, chunks + 1)`
    weights, lower triangular, whose column 0 is the state's.
    """
    maxima = ops.concatenate([log_scale[..., None], chunk_max], axis=-1)
    seen = where(lower, maxima[..., None, :], LOG_ZERO)
    running = max_along(seen, axis=-1, initial=LOG_ZERO)
    return running, ops.where(lower, ops.exp(seen - running[..., None]), 0.0)


def _prefix_sums(first, local, weights):
    """States before each chunk, and the state after the last."""
    batch, heads, chunks, *tail = sizes(local)
    size = math.prod(tail)
    first = ops.reshape(first, (batch, heads, 1, size))
    local = ops.reshape(local, (batch, heads, chunks, size))
    by_first, by_local = weights[..., :1], weights[..., 1:]
    before = by_local[..., :-1, :] @ local + by_first[..., :-1, :] * first
    last = by_local[..., -1:, :] @ local + by_first[..., -1:, :] * first
    return (
        ops.reshape(before, (batch, heads, chunks, *tail)),
        ops.reshape(last, (batch, heads, *tail)),
    )


def _prefix_sums_gradient(grad_before, grad_last, weights):
    """Gradients of `first` and of `local`."""
    batch, heads, chunks, *tail = sizes(grad_before)
    size = math.prod(tail)
    grad_last = ops.reshape(grad_last, (batch, heads, 1, size))
    grad_before = ops.reshape(grad_before, (batch, heads, chunks, size))
    weights = ops.swapaxes(weights, -1, -2)
    by_before, by_last = weights[..., :-1], weights[..., -1:]
    grad_first = by_before[..., :1, :] @ grad_before + by_last[..., :1, :] * grad_last
    grad_local = by_before[..., 1:, :] @ grad_before + by_last[..., 1:, :] * grad_last
    return (
        ops.reshape(grad_first, (batch, heads, *tail)),
        ops.reshape(grad_local, (batch, heads, chunks, *tail)),
    )
