"""The definition of linear attention with a decay and a correction, dense.

The recurrence `S[t] = (I − β[t] k[t]ᵀ k[t]) diag(exp(g[t])) S[t−1] + β[t] k[t]ᵀ v[t]`,
unrolled: with the weights `w[t, s] = Σ_i q[t]_i k[s]_i exp(G[t]_i − G[s]_i)` and the
same for keys `p[t, s]`, `y = W (I + diag(β) P)⁻¹ diag(β) v`.
"""

from keras import ops

from keras_efficient_attn.ops.common.numerics import cumulative_sum
from keras_efficient_attn.ops.common.online_softmax import divide


def reference_gated_attention(tensors, rates, normalize):
    """The output, in the dtype of the inputs.

    Args:
        tensors: `(query_features, key_features, value)`, `(batch, length, heads, dim)`,
            equally long, zero for keys that do not exist.
        rates: `(log_decay, beta)`, each `None` or `(batch, length, heads, 1)`; decays
            may have as many entries as features. Zero for keys that do not exist.
        normalize: Whether to divide by the output for values of 1.
    """
    query, key, value, *rates = (
        x if x is None else ops.swapaxes(x, 1, 2) for x in (*tensors, *rates)
    )
    decay, beta = rates
    lower = ops.tril(ops.ones((query.shape[2],) * 2, "bool"))
    factors = ops.cast(lower, query.dtype)[..., None]
    if decay is not None:
        decay = cumulative_sum(decay, 2)
        change = decay[..., :, None, :] - decay[..., None, :, :]
        factors = factors * ops.exp(ops.where(lower[..., None], change, 0.0))
    weights = ops.sum(query[..., :, None, :] * key[..., None, :, :] * factors, axis=-1)
    if beta is not None:
        seen = ops.sum(key[..., :, None, :] * key[..., None, :, :] * factors, axis=-1)
        seen = ops.eye(query.shape[2], dtype=query.dtype) + beta * ops.tril(seen, k=-1)
        weights = weights @ ops.linalg.inv(seen) * ops.swapaxes(beta, -1, -2)
    output = weights @ value
    if normalize:
        output = divide(output, ops.sum(weights, axis=-1))
    return ops.swapaxes(output, 1, 2)
