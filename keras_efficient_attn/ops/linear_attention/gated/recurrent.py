"""Linear attention with a decay and a correction, one position at a time.

```
S' = diag(exp(g)) S
S  = S' + β φ(k)ᵀ (v − φ(k) S')
y  = φ(q) S
```

and without `β`, `S = S' + φ(k)ᵀ v`.
"""

from keras import ops

from keras_efficient_attn.ops.common.online_softmax import divide
from keras_efficient_attn.ops.linear_attention.gated.chunked import (
    map_features,
)


def recurrent_gated_attention(tensors, rates, state, map_weights, config):
    """Computes `chunked_gated_attention` for one position."""
    query, key, value, *rates = (
        None if x is None else ops.cast(ops.swapaxes(x, 1, 2), state.dtype)
        for x in (*tensors, *rates)
    )
    # The maps need chunks: (batch, heads, 1, 1, dim).
    query, key = map_features(config, query[:, :, None], key[:, :, None], map_weights)
    query, key = query[:, :, 0], key[:, :, 0]
    log_decay, beta = rates
    if log_decay is not None:
        state = state * ops.swapaxes(ops.exp(log_decay), -1, -2)
    if beta is not None:
        value = beta * (value - key @ state)
    state = state + ops.swapaxes(key, -1, -2) @ value
    output = query @ state
    if config.output == "normalized":
        output = divide(output[..., :-1], output[..., -1])
    return ops.swapaxes(output, 1, 2), state
