"""One step of causal linear attention, over a group of chunks, and its gradient.

For TensorFlow and JAX; PyTorch has its own, of the same formulae.

With features Q and K, values V and, per key, a log weight l, chunk c gives

```
A         = tril(Q Kᵀ) ∘ exp(l[s] − scale[t])
values    = A V + exp(M[c] − scale) ∘ (Q S[c])
total     = A 1 + exp(M[c] − scale) ∘ (Q z[c])
```

where `S[c] = Σ exp(l[s] − M[c]) K[s]ᵀ V[s]` and `z[c] = Σ exp(l[s] − M[c]) K[s]` sum
over the keys before the chunk, and `M` is the running maximum of their log weights.
`scale` is the maximum over the keys that a query may see, and over no other: it
cancels in `values / total`, so nothing overflows, no feature needs an epsilon, and
the past is exactly independent of the future.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    columns,
    lower_triangle,
    sizes,
)
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, larger
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divided, reciprocal
from keras_efficient_attn.ops.common.scan import vector_jacobian_product
from keras_efficient_attn.ops.linear_attention.keys import mapped_keys


@functools.cache
def causal_step(query_map, key_map, chunk_size, masked, output):
    """`(step, gradient)` for `recompute_scan`, one object per configuration.

    The carry is `(sum, normalizer, log_scale)`; `x` is `(query, key, value)` and what
    `mapped_keys` takes; the constants are the weights of the maps. `log_scale` is a
    constant for gradients.
    """

    def prepare(x, map_weights):
        dtype = accumulator_dtype(*x)
        x = (by_head(ops.cast(t, dtype), chunk_size) for t in x)
        query, key, value, *rest = x
        query, query_log_scale = query_map(query, *map_weights)
        key, log_weight = mapped_keys(key_map, key, rest, map_weights, masked)
        return query, key, value, log_weight, query_log_scale

    def step(carry, x, map_weights):
        query, key, value, log_weight, query_log_scale = prepare(x, map_weights)
        parts, new_carry = _chunks(carry, query, key, value, log_weight)
        values = parts["scores"] @ value + parts["far_query"] @ parts["before"]
        outputs = _outputs(values, parts, query_log_scale, output)
        return new_carry, tuple(by_position(t) for t in outputs)

    def gradient(carry, x, map_weights, y, carry_gradient, y_gradient):
        prepared, pull = vector_jacobian_product(prepare, (x, map_weights))
        query, key, value, log_weight, query_log_scale = prepared
        parts, _ = _chunks(carry, query, key, value, log_weight)
        of_values, of_totals, of_query_log_scale = _outputs_gradient(
            parts, query_log_scale, y, y_gradient, chunk_size, output
        )
        of_carry, *of_chunks = _chunks_gradient(
            parts, query, key, value, log_weight, of_values, of_totals, carry_gradient
        )
        return of_carry, *pull((*of_chunks, of_query_log_scale))

    return step, gradient


def _chunks(carry, query, key, value, log_weight):
    """What both directions need: scores, states before the chunks, and their weights.

    `far_query` are the queries as they read the states.
    """
    sums, normalizer, log_scale = carry
    log_scale = ops.stop_gradient(log_scale)
    scores = query @ ops.swapaxes(key, -1, -2)
    parts = {"scale": None, "factors": None, "far_query": query, "far_key": key}
    if log_weight is None:
        parts["scores"] = ops.tril(scores)
        batch, heads, chunks = sizes(query)[:3]
        weights = ops.cast(lower_triangle(chunks + 1), query.dtype)
        parts["weights"] = ops.broadcast_to(
            weights, (ops.shape(query)[0], heads, chunks + 1, chunks + 1)
        )
    else:
        constant = ops.stop_gradient(log_weight)
        chunk_max = ops.max(constant, axis=-1, initial=LOG_ZERO)
        # Of the state, and of each query: what it may see, and no more.
        state_max, parts["weights"] = _prefix_weights(log_scale, chunk_max)
        log_scale = state_max[..., -1]
        lower = lower_triangle(ops.shape(query)[3])
        seen = ops.where(lower, constant[..., None, :], LOG_ZERO)
        scale = larger(
            ops.max(seen, axis=-1, initial=LOG_ZERO), state_max[..., :-1, None]
        )
        shifted = log_weight[..., None, :] - scale[..., None]
        # Above the diagonal the shift may be large: cut before the exponential.
        shifted = ops.where(lower, shifted, LOG_ZERO)
        parts["scale"] = scale
        parts["factors"] = ops.where(lower, ops.exp(shifted), 0.0)
        parts["scores"] = scores * parts["factors"]
        parts["key_factors"] = ops.exp(log_weight - chunk_max[..., None])[..., None]
        parts["query_factors"] = ops.exp(state_max[..., :-1, None] - scale)[..., None]
        parts["far_key"] = key * parts["key_factors"]
        parts["far_query"] = query * parts["query_factors"]
    local = ops.swapaxes(parts["far_key"], -1, -2) @ value
    parts["before"], sums = _prefix_sums(sums, local, parts["weights"])
    local = ops.sum(parts["far_key"], axis=-2)
    parts["before_normalizer"], normalizer = _prefix_sums(
        normalizer, local, parts["weights"]
    )
    return parts, (sums, normalizer, log_scale)


def _chunks_gradient(
    parts, query, key, value, log_weight, of_values, of_totals, carry_gradient
):
    """Gradients of the carry, queries, keys, values and log weights."""
    far_query, far_key = parts["far_query"], parts["far_key"]
    of_scores = of_values @ ops.swapaxes(value, -1, -2)
    of_far_query = of_values @ ops.swapaxes(parts["before"], -1, -2)
    of_before = ops.swapaxes(far_query, -1, -2) @ of_values
    of_before_normalizer = ops.zeros_like(parts["before_normalizer"])
    if of_totals is not None:
        column = of_totals[..., None]
        of_scores = of_scores + column
        of_far_query = of_far_query + column * parts["before_normalizer"][..., None, :]
        of_before_normalizer = (ops.swapaxes(far_query, -1, -2) @ column)[..., 0]
    of_sums, of_local = _prefix_sums_gradient(
        of_before, carry_gradient[0], parts["weights"]
    )
    of_normalizer, of_local_normalizer = _prefix_sums_gradient(
        of_before_normalizer, carry_gradient[1], parts["weights"]
    )
    of_value = ops.swapaxes(parts["scores"], -1, -2) @ of_values + far_key @ of_local
    of_far_key = (
        value @ ops.swapaxes(of_local, -1, -2) + of_local_normalizer[..., None, :]
    )
    of_log_weight = None
    if log_weight is None:
        of_scores = ops.tril(of_scores)
    else:
        # Above the diagonal, scores and factors are zero.
        of_log_weight = ops.sum(of_scores * parts["scores"], axis=-2) + ops.sum(
            of_far_key * far_key, axis=-1
        )
        of_scores = of_scores * parts["factors"]
        of_far_query = of_far_query * parts["query_factors"]
        of_far_key = of_far_key * parts["key_factors"]
    of_query = of_scores @ key + of_far_query
    of_key = ops.swapaxes(of_scores, -1, -2) @ query + of_far_key
    of_carry = (of_sums, of_normalizer, ops.zeros_like(carry_gradient[2]))
    return of_carry, of_query, of_key, of_value, of_log_weight


def _totals(parts):
    far = parts["far_query"] @ parts["before_normalizer"][..., None]
    return ops.sum(parts["scores"], axis=-1) + far[..., 0]


def _outputs(values, parts, query_log_scale, output):
    if output == "normalized":
        return (divided(values, _totals(parts)),)
    scale = _total_scale(parts, query_log_scale)
    if output == "sum":
        return (values if scale is None else values * ops.exp(scale)[..., None],)
    totals = _totals(parts)
    return values, totals, ops.zeros_like(totals) if scale is None else scale


def _total_scale(parts, query_log_scale):
    """The log scale of the sums, or `None` for 0."""
    scale = parts["scale"]
    if scale is None or query_log_scale is None:
        return query_log_scale if scale is None else scale
    return scale + query_log_scale


def _outputs_gradient(parts, query_log_scale, y, y_gradient, chunk_size, output):
    """Gradients of values, totals and the queries' log scales; `None` for zero."""
    of_y = by_head(y_gradient[0], chunk_size)
    if output == "partial":
        of_totals, of_scale = (
            by_head(columns(t), chunk_size)[..., 0] for t in y_gradient[1:]
        )
        return of_y, of_totals, None if query_log_scale is None else of_scale
    # A product with ones: XLA on a CPU is ten times slower in sums of products.
    ones = ops.ones((ops.shape(y[0])[-1], 1), of_y.dtype)
    along = by_head((y_gradient[0] * y[0]) @ ones, chunk_size)[..., 0]
    if output == "normalized":
        inverse = reciprocal(_totals(parts))
        return of_y * inverse[..., None], -along * inverse, None
    scale = _total_scale(parts, query_log_scale)
    of_values = of_y if scale is None else of_y * ops.exp(scale)[..., None]
    return of_values, None, None if query_log_scale is None else along


def _prefix_weights(log_scale, chunk_max):
    """Running maxima, and the weights that bring earlier chunks to them.

    Returns `(batch, heads, chunks + 1)` maxima over the state and the chunks before
    each chunk (the last: after all), and `(batch, heads, chunks + 1, chunks + 1)`
    weights, lower triangular, whose column 0 is the state's.
    """
    maxima = ops.concatenate([log_scale[..., None], chunk_max], axis=-1)
    lower = lower_triangle(ops.shape(maxima)[-1])
    seen = ops.where(lower, maxima[..., None, :], LOG_ZERO)
    running = ops.max(seen, axis=-1, initial=LOG_ZERO)
    return running, ops.where(lower, ops.exp(seen - running[..., None]), 0.0)


def _prefix_sums(first, local, weights):
    """States before each chunk, and the state after the last."""
    batch, heads, chunks, *tail = sizes(local)
    first, local = _flat(first[:, :, None]), _flat(local)
    by_first, by_local = weights[..., :1], weights[..., 1:]
    before = by_local[..., :-1, :] @ local + by_first[..., :-1, :] * first
    last = by_local[..., -1:, :] @ local + by_first[..., -1:, :] * first
    return (
        ops.reshape(before, (batch, heads, chunks, *tail)),
        ops.reshape(last, (batch, heads, *tail)),
    )


def _prefix_sums_gradient(of_before, of_last, weights):
    """Gradients of `first` and of `local`."""
    batch, heads, chunks, *tail = sizes(of_before)
    of_before, of_last = _flat(of_before), _flat(of_last[:, :, None])
    weights = ops.swapaxes(weights, -1, -2)
    by_before, by_last = weights[..., :-1], weights[..., -1:]
    of_first = by_before[..., :1, :] @ of_before + by_last[..., :1, :] * of_last
    of_local = by_before[..., 1:, :] @ of_before + by_last[..., 1:, :] * of_last
    return (
        ops.reshape(of_first, (batch, heads, *tail)),
        ops.reshape(of_local, (batch, heads, chunks, *tail)),
    )


def _flat(x):
    """`(batch, heads, chunks, ...)` with the axes behind the chunks as one."""
    batch, heads, chunks, *tail = sizes(x)
    size = functools.reduce(lambda a, b: a * b, tail)
    return ops.reshape(x, (batch, heads, chunks, size))
