"""One position of a causal sequence: one key more in the state, and one read of it."""

from keras import ops

from keras_efficient_attn.ops.common.block_softmax import softmax_part
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, finish, merge
from keras_efficient_attn.ops.vq_attention.cache import cache_of, named_cache
from keras_efficient_attn.ops.vq_attention.codebook import look_up, responsibilities
from keras_efficient_attn.ops.vq_attention.compressed import MIN_COUNT, one_hot_codes
from keras_efficient_attn.ops.vq_attention.expanded import feature_sums, read
from keras_efficient_attn.ops.vq_attention.tensors import each
from keras_efficient_attn.ops.vq_attention.window import (
    near_keys,
    window_state,
    with_history,
)


def attend_token(query, keys, codebook, config, positions, state):
    """As `window.attend_segment`, for a segment of one position, window or not.

    Args:
        query: `(batch, 1, heads, dim)`.
        keys: `Keys` of length 1.
        codebook: `Codebook`.
        config: `VQConfig`.
        positions: `Positions` or `None`.
        state: The state before the position.

    Returns:
        `(output, state)`: `(batch, 1, heads, value_dim)`, and the state after it.
    """
    parts, new_state = [], {}
    query = ops.swapaxes(query, 1, 2)
    if config.window is not None:
        history = with_history(state, near_keys(keys, codebook, config))
        keys = each(lambda t: t[:, :1], history)
        new_state = window_state(history, 1)
        window = each(lambda t: t[:, 1:], history)
        parts.append(_attend_to_window(query, window, positions))
    cache = cache_of(state, query.dtype)
    if not config.gradient_through_cache:
        keys, codebook, cache = (
            each(ops.stop_gradient, t) for t in (keys, codebook, cache)
        )
    cache = _with_key(cache, keys, codebook, config)
    parts.append(_read_cache(query, cache, codebook, config))
    output = finish(*merge(parts), normalize=True)
    return ops.swapaxes(output, 1, 2), {**new_state, **named_cache(cache)}


def _attend_to_window(query, window, positions):
    """The part of the keys in the window, for `(batch, heads, 1, dim)`."""
    key, value = (ops.swapaxes(t, 1, 2) for t in window[:2])
    of_positions = None
    if positions is not None:
        position_key = ops.transpose(positions.key, (1, 2, 0))
        of_positions = ops.swapaxes(positions.query, 1, 2) @ position_key
    allowed = window.valid[:, None, None] > 0
    return softmax_part(query, key, value, allowed, None, of_positions)


def _with_key(cache, keys, codebook, config):
    """The cache with the one key."""
    codes = codebook.codes
    key, value = (ops.swapaxes(t, 1, 2) for t in keys[:2])
    valid = keys.valid[..., None]
    if config.soft:
        chosen = responsibilities(key[:, :, None], codes, codebook.sigma)[:, :, 0, 0]
        chosen = chosen * valid
    else:
        chosen = one_hot_codes(keys.index[:, 0, :, None], valid, codes)
    if config.order == 0:
        sums, counts = cache
        return sums + chosen[..., None] * value, counts + chosen
    residual = key - ops.swapaxes(look_up(codes, keys.index), 1, 2)
    block = (t[:, :, None] for t in (chosen[:, :, None], residual, value))
    new = feature_sums(*block, config.expanded_dims(codes.shape[-1]))
    return tuple(old + t[:, :, 0] for old, t in zip(cache, new, strict=True))


def _read_cache(query, cache, codebook, config):
    """The part of the keys in the cache, for `(batch, heads, 1, dim)`."""
    codes = codebook.codes
    if config.order == 2:
        cache = each(lambda t: t[:, :, None], cache)
        rank = config.expanded_dims(codes.shape[-1])
        part = read(query[:, :, None], codes, cache, rank)
        return each(lambda t: t[:, :, 0], part)
    sums, counts = cache
    counts = counts[:, :, None]
    full = counts > MIN_COUNT
    logits = query @ ops.swapaxes(codes, -1, -2)
    with_counts = logits + ops.log(ops.where(full, counts, 1.0))
    with_counts = ops.stop_gradient(ops.where(full, with_counts, LOG_ZERO))
    scale = ops.max(with_counts, axis=-1)
    # Of one key of each code: at most 1 / count.
    weights = ops.exp(ops.where(full, logits - scale[..., None], LOG_ZERO))
    return weights @ sums, ops.sum(weights * counts, axis=-1), scale
