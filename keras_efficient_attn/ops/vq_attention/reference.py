"""The definition of attention over vector-quantised keys: quadratic."""

import math

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import (
    accumulator_dtype,
    larger,
    max_along,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, divide
from keras_efficient_attn.ops.common.positions import window_distances
from keras_efficient_attn.ops.vq_attention.config import map_tensors


def vq_attention(query, keys, codebook, config, causal, positions=None):
    """Computes `ops.vq_attention` without a state.

    The `(query_length, key_length)` weights are formed, in the accumulator's dtype.
    Arguments are as for `attend_to_keys_and_codes`; keys need no `index`.
    """
    key, value, key_mask, _ = keys
    dtype, window = accumulator_dtype(query, key, value), config.window
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    codebook, sigma, log_weights = map_tensors(lambda t: ops.cast(t, dtype), codebook)
    if positions is not None:
        positions = map_tensors(lambda t: ops.cast(t, dtype), positions)
    length, key_length = shape_of(query)[1], shape_of(key)[1]
    key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
    if sigma is None:
        codebook = ops.stop_gradient(codebook)
    # p(code | key): 1 for the nearest code, or the responsibilities of a mixture.
    distances = ops.sum(
        ops.square(key[..., None, :] - codebook[None, None]), axis=-1
    )  # (batch, key_length, heads, codes)
    if sigma is None:
        nearest = ops.argmin(distances, axis=-1)
        codes = ops.arange(codebook.shape[1], dtype="int32")
        log_p = ops.where(ops.cast(nearest, "int32")[..., None] == codes, 0.0, LOG_ZERO)
        log_p = ops.cast(log_p, dtype)
    else:
        log_p = -distances / (2.0 * ops.square(sigma)) - key.shape[-1] * ops.log(sigma)
        if log_weights is not None:
            log_p = log_p + log_weights
        log_p = log_p - _largest(log_p)
        log_p = log_p - ops.log(ops.sum(ops.exp(log_p), axis=-1, keepdims=True))

    # log Σ exp(q·c) p(c | k), for every query and key.
    code_logits = ops.einsum("bthd,hcd->bthc", query, codebook)
    joint = code_logits[:, :, None] + log_p[:, None]
    largest = _largest(joint)
    far = ops.log(ops.sum(ops.exp(joint - largest), axis=-1)) + largest[..., 0]
    logits = ops.transpose(far, (0, 3, 1, 2))

    rows = ops.arange(length, dtype="int32")[:, None]
    distance = rows - ops.arange(key_length, dtype="int32")[None, :]
    allowed = ops.ones((1, 1, length, key_length), "bool")
    if key_mask is not None:
        allowed = allowed & ops.cast(key_mask, "bool")[:, None, None, :]
    if causal:
        allowed = allowed & (distance >= 0)
    if config.order == 2:
        chosen = ops.exp(log_p)
        residual = key - ops.einsum("bshc,hcd->bshd", chosen, codebook)
        rank = config.expanded_dims(key.shape[-1])
        logits = logits + ops.log(
            _expansion(query, residual, chosen, rank, allowed, distance, window)
        )
    if window is not None:
        near = ops.abs(distance) < window
        if config.quantize_window:
            code = ops.einsum("bshc,hcd->bshd", ops.exp(log_p), codebook)
            key = key + ops.stop_gradient(code - key)
        exact = ops.einsum("bthd,bshd->bhts", query, key)
        if positions is not None:
            by_distance = ops.einsum("bthd,mhd->bhtm", *positions)
            every = window_distances(window, causal)
            index = ops.convert_to_tensor(every[0], "int32") - distance
            index = ops.where(near, index, 0)
            index = ops.where(index < len(every), index, 0)
            index = ops.broadcast_to(index[None, None], shape_of(exact))
            exact = exact + ops.take_along_axis(by_distance, index, axis=-1)
        logits = ops.where(near, exact, logits)
    logits = ops.where(allowed, logits, LOG_ZERO)
    weights = ops.where(allowed, ops.exp(logits - _largest(logits, LOG_ZERO / 2)), 0.0)
    values = ops.einsum("bhts,bshv->bthv", weights, value)
    return divide(values, ops.transpose(ops.sum(weights, axis=-1), (0, 2, 1)))


def _largest(logits, initial=-math.inf):
    """The largest along the last axis, at least `initial`, without gradient."""
    logits = ops.stop_gradient(logits)
    return max_along(logits, axis=-1, keepdims=True, initial=initial)


def _expansion(query, residual, chosen, rank, allowed, distance, window):
    """`1 + x + x²/2 + y/2`, for every query and key, `(batch, heads, T, S)`."""
    x = ops.einsum("bthd,bshd->bhts", query[..., :rank], residual[..., :rank])
    squares = ops.einsum(
        "bthd,bshd->bhts",
        ops.square(query[..., rank:]),
        ops.square(residual[..., rank:]),
    )
    same_code = ops.einsum("bshc,buhc->bhsu", chosen, chosen)
    if window is None:
        sides = (ops.ones_like(distance) > 0,)
    else:
        sides = (distance >= window, distance <= -window)
    mean = ops.zeros_like(x)
    for side in sides:
        seen = ops.cast(allowed & side, x.dtype)
        number = (seen + ops.zeros_like(x)) @ same_code
        one_side = (seen * squares) @ same_code / larger(number, ops.ones_like(number))
        mean = mean + ops.where(allowed & side, one_side, 0.0)
    return 1.0 + x + 0.5 * ops.square(x) + 0.5 * mean
