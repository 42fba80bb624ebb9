"""One position of a causal sequence: adds one key to the state and reads it once."""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.online_softmax import (
    divide,
    merge,
)
from keras_efficient_attn.ops.common.state import keep_last
from keras_efficient_attn.ops.vq_attention.blocks import one_hot_codes, weigh
from keras_efficient_attn.ops.vq_attention.codebook import (
    look_up,
    quantize,
    responsibilities,
)
from keras_efficient_attn.ops.vq_attention.config import (
    cache_of,
    leaving_keys,
    map_tensors,
    named_cache,
    named_window,
    with_history,
)
from keras_efficient_attn.ops.vq_attention.expanded import feature_sums, read


def attend_token(query, keys, codebook, config, positions, state, lengths):
    """Computes `windowed.attend_segment` for one position, with or without window."""
    query, window, new_state = ops.swapaxes(query, 1, 2), None, {}
    if config.window is not None:
        near = quantize(keys, codebook) if config.quantize_window else keys
        history = with_history(state, near)
        keys = leaving_keys(history, 1, lengths)
        recent = map_tensors(lambda t: t[:, 1:], history)
        window = _window(query, recent, positions)
        kept = map_tensors(lambda t: keep_last(t, 1, lengths), history)
        new_state = named_window(kept)
    cache = cache_of(state, config, query.dtype)
    if not config.gradient_through_cache:
        keys, codebook, cache = (
            map_tensors(ops.stop_gradient, t) for t in (keys, codebook, cache)
        )
    cache = _with_key(cache, keys, codebook, config)
    output = _read(query, cache, codebook.codes, config, window)
    return ops.swapaxes(output, 1, 2), {**new_state, **named_cache(cache)}


def _window(query, recent, positions):
    """Logits, values and mask of the keys in the window.

    Returns:
        Tensors of shapes `(batch, heads, 1, window)`, `(batch, heads, window,
        value_dim)` and `(batch, 1, 1, window)`.
    """
    logits = query @ ops.transpose(recent.key, (0, 2, 3, 1))
    if positions is not None:
        position_query = ops.swapaxes(positions.query, 1, 2)
        logits = logits + position_query @ ops.transpose(positions.key, (1, 2, 0))
    return logits, ops.swapaxes(recent.value, 1, 2), recent.valid[:, None, None]


def _with_key(cache, keys, codebook, config):
    """The cache with one additional key."""
    codes, valid = codebook.codes, keys.valid[..., None]
    value = ops.swapaxes(keys.value, 1, 2)
    if config.soft:
        key = ops.swapaxes(keys.key, 1, 2)[:, :, None]
        mixture = codebook.sigma, codebook.log_weights
        chosen = responsibilities(key, codes, *mixture)[:, :, 0, 0] * valid
    else:
        chosen = one_hot_codes(keys.index[:, 0, :, None], valid, codes.shape[1])
    if config.order == 0:
        sums, counts = cache
        return sums + chosen[..., None] * value, counts + chosen
    residual = ops.swapaxes(keys.key - look_up(codes, keys.index), 1, 2)
    index = ops.swapaxes(keys.index, 1, 2)[..., None]
    block = (t[:, :, None] for t in (chosen[:, :, None], index, residual, value))
    new = feature_sums(*block, config.expanded_dims(codes.shape[-1]))
    return tuple(old + t[:, :, 0] for old, t in zip(cache, new, strict=True))


def _read(query, cache, codes, config, window):
    """The output of all keys, `(batch, heads, 1, value_dim)`."""
    if config.order == 2:
        rank = config.expanded_dims(codes.shape[-1])
        expanded = map_tensors(lambda t: t[:, :, None], cache)
        part = read(query[:, :, None], codes, expanded, rank)
        parts = [map_tensors(lambda t: t[:, :, 0], part)]
        if window is not None:
            logits, values, valid = window
            weights, *totals_and_scale = weigh(logits, valid)
            parts.append((weights @ values, *totals_and_scale))
        values, totals, _ = merge(parts)
        return divide(values, totals)
    sums, numbers = cache
    numbers, num_codes = numbers[:, :, None], codes.shape[1]
    logits = query @ ops.swapaxes(codes, -1, -2)
    if window is None:
        weights, total, _ = weigh(logits, numbers)
        return divide(weights @ sums, total)
    # A key in the window counts as a code with one key; a hidden key as an empty code.
    window_logits, values, valid = window
    valid = ops.broadcast_to(valid, shape_of(window_logits))
    weights, total, _ = weigh(
        ops.concatenate([logits, window_logits], axis=-1),
        ops.concatenate([numbers, valid], axis=-1),
    )
    output = weights[..., :num_codes] @ sums + weights[..., num_codes:] @ values
    return divide(output, total)
