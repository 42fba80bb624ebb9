"""The definition of linear attention: quadratic, and nothing else."""

from keras import ops


def linear_attention(
    query_features,
    key_features,
    value,
    key_log_weight=None,
    key_mask=None,
    causal=False,
    normalize=True,
):
    """Weights `w[t, s] = exp(l[s]) φq[t]·φk[s]`; output `Σ w v / Σ w`, or `Σ w v`.

    Arguments and shapes are those of `ops.linear_attention`, without the state.
    The `(query_length, key_length)` weights are formed, in the dtype of the input.
    """
    weights = ops.einsum("bthm,bshm->bhts", query_features, key_features)
    if key_log_weight is not None:
        shifted = ops.transpose(key_log_weight, (0, 2, 1))[:, :, None, :]
        if normalize:
            shifted = shifted - ops.max(shifted, axis=-1, keepdims=True)
        weights = weights * ops.exp(shifted)
    if key_mask is not None:
        weights = ops.where(key_mask[:, None, None, :], weights, 0.0)
    if causal:
        rows = ops.arange(ops.shape(query_features)[1])[:, None]
        columns = ops.arange(ops.shape(key_features)[1])[None, :]
        weights = ops.where(rows >= columns, weights, 0.0)
    output = ops.einsum("bhts,bshv->bthv", weights, value)
    if not normalize:
        return output
    total = ops.transpose(ops.sum(weights, axis=-1), (0, 2, 1))[..., None]
    return ops.where(total == 0.0, 0.0, output / ops.where(total == 0.0, 1.0, total))
