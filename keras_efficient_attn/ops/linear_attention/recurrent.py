"""Linear attention for one position and a state, for generation.

```
M' = max(M, l)
S' = e^(M − M') S + e^(l − M') φ(k)ᵀ v
z' = e^(M − M') z + e^(l − M') φ(k)
y  = φ(q) S' / φ(q)·z'
```

with the log weight `l` of the key and the running maximum `M`. The state is that of the
chunked form; each form can continue from the other.
"""

from keras import ops

from keras_efficient_attn.ops.common.chunking import sizes
from keras_efficient_attn.ops.common.numerics import larger, max_along, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, finish
from keras_efficient_attn.ops.linear_attention.chunked import weigh_keys


def recurrent_linear_attention(tensors, state, map_weights, config):
    """Causal attention of one position after the positions in the state.

    Args:
        tensors: `(query, key, value, valid, key_log_weight)`, of one position, and
            state, map_weights, config: as for `causal_linear_attention`.

    Returns:
        `(outputs, state)`, as `causal_linear_attention`.
    """
    query, key, value, valid, key_log_weight = tensors
    sums, normalizer, log_scale = state
    batch, _, heads, value_dim = sizes(value)

    def by_head(x, heads, dim):
        return ops.reshape(ops.cast(x, sums.dtype), (batch, heads, 1, 1, dim))

    rest = [] if valid is None else [by_head(valid, 1, 1)]
    rest += [] if key_log_weight is None else [by_head(key_log_weight, heads, 1)]
    query = by_head(query, heads, query.shape[-1])
    query, query_log_scale = config.query_map(query, *map_weights)
    key = by_head(key, heads, key.shape[-1])
    masked = valid is not None
    key, log_weight = weigh_keys(*config.key_map(key, *map_weights), rest, masked)
    query = ops.reshape(query, (batch, heads, config.num_features))
    key = ops.reshape(key, (batch, heads, config.num_features))
    if log_weight is None and valid is None:
        log_weight, new_log_scale = 0.0, ops.relu(log_scale)
    else:
        if log_weight is None:
            log_weight = where(valid > 0, ops.zeros_like(log_scale), LOG_ZERO)
        log_weight = ops.reshape(log_weight, (batch, heads))
        new_log_scale = larger(log_scale, ops.stop_gradient(log_weight))
    kept = ops.exp(log_scale - new_log_scale)[..., None]
    key = key * ops.exp(log_weight - new_log_scale)[..., None]
    value = ops.reshape(ops.cast(value, sums.dtype), (batch, heads, 1, value_dim))
    sums = sums * kept[..., None] + key[..., None] * value
    normalizer = normalizer * kept + key

    # `outputs` have positions before heads; a single position needs no transpose.
    values = ops.reshape(query[:, :, None] @ sums, (batch, 1, heads, value_dim))
    totals = ops.sum(query * normalizer, axis=-1)[:, None]
    state = sums, normalizer, new_log_scale
    if config.output == "normalized":
        return (finish(values, totals, None, True),), state
    scale = new_log_scale[:, None]
    if query_log_scale is not None:
        scale = scale + ops.reshape(query_log_scale, (batch, 1, heads))
    if config.output == "sum":
        return (finish(values, totals, scale, False),), state
    return (values, totals, scale), state


def attend_to_all(query, key, value, valid, bias=None):
    """Partial softmax of one query over all existing keys.

    Args:
        query: `(batch, 1, heads, dim)`, scaled.
        key: `(batch, keys, heads, dim)`.
        value: `(batch, keys, heads, value_dim)`, zero where not valid.
        valid: `(batch, keys)`.
        bias: Optional `(keys, heads)`, added to the logits.

    Returns:
        `(values, totals, log_scale)` for `online_softmax.merge`, each of
        `(batch, 1, heads, ...)`.
    """
    query, key, value = (ops.swapaxes(x, 1, 2) for x in (query, key, value))
    # Sums and products need fewer operations than selections.
    kept = valid[:, None, None]
    logits = query @ ops.swapaxes(key, -1, -2) + (1.0 - kept) * LOG_ZERO
    if bias is not None:
        logits = logits + ops.transpose(bias)[:, None]
    scale = max_along(ops.stop_gradient(logits), axis=-1)
    weights = ops.exp(logits - scale[..., None]) * kept
    part = weights @ value, ops.sum(weights, axis=-1), scale
    return tuple(ops.swapaxes(x, 1, 2) for x in part)
