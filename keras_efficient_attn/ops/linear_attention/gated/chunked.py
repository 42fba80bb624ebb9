"""Linear attention with a decay and a correction, over groups of chunks."""

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import chunk_layout, pad_to
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.linear_attention.gated.group import group_step


def chunked_gated_attention(tensors, rates, state, map_weights, config):
    """Causal attention over `(batch, length, heads, dim)`.

    Args:
        tensors: `(query, key, value)`, equally long, zero for keys that do not exist.
        rates: `(log_decay, beta)`, each `None` or `(batch, length, heads, 1)`; decays
            may have as many entries as features. Zero for keys that do not exist.
        state: `(batch, heads, features, value_dim)`, and with normalized outputs an
            additional column for the sum of the weights.
        map_weights: Tuple of tensors.
        config: `LinearAttentionConfig`.

    Returns:
        `(output, state)`.
    """
    query, key, value = tensors
    length = shape_of(query)[1]
    heads, features, value_dim = state.shape[1:]
    # A matrix row, features and values. The step has several of each, but smaller steps
    # were slower, especially on PyTorch.
    floats = config.chunk_length + features + (value_dim or features)
    if rates[0] is not None and rates[0].shape[-1] != 1:
        floats += 16 * features
    floats *= heads
    size, chunks, groups = chunk_layout(
        length, config.chunk_length, query.shape[0], floats
    )
    xs = (query, key, value, *(rate for rate in rates if rate is not None))
    xs = tuple(pad_to(x, groups * chunks * size) for x in xs)
    has_decay, has_beta = (rate is not None for rate in rates)
    step, gradient = group_step(config, size, has_decay, has_beta)
    (state,), (output,) = recompute_scan(
        step, (state,), xs, map_weights, gradient, num_steps=groups
    )
    return output[:, :length], state
