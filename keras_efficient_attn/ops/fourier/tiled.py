"""Fourier attention a tile of queries at a time, in memory linear in the length."""

import functools

import keras
from keras import ops

from keras_efficient_attn.ops.common.chunking import chunk_layout, pad_to
from keras_efficient_attn.ops.common.compiled import compiled
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.fourier.kernel import (
    SLOTS,
    join_dims,
    log_kernel,
    log_kernel_gradient,
    split_dims,
    with_sines,
)

CHUNK_SIZE = 4
# Keys that are assumed where their number is not known yet.
USUAL_KEYS = 1024


@compiled("power", "causal", "chunk_size", "fused")
def fourier_sums(
    query,
    key,
    value,
    radius,
    first_position=0,
    *,
    power=4,
    key_mask=None,
    causal=False,
    chunk_size=CHUNK_SIZE,
    fused=False,
):
    """The sums of `fourier_attention`, relative to the largest weight of each query.

    Args:
        query, key, value, radius, first_position, power, key_mask, causal, chunk_size:
            As for `fourier_attention`.
        fused: Whether its implementation is `"fused"`.

    Returns:
        `(values, totals, log_scale)` of shapes `(batch, length, heads, value_dim)` and
        `(batch, length, heads)`: a part for `partial_attention.merge`.
    """
    dtype = accumulator_dtype(query, key, value)
    valid = None
    if key_mask is not None:
        kept = ops.cast(key_mask, "bool")[..., None, None]
        key = ops.where(kept, key, ops.zeros_like(key))
        value = ops.where(kept, value, ops.zeros_like(value))
        valid = ops.cast(key_mask, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    radius = ops.cast(radius, dtype)
    query, key = query * radius, key * radius

    length, heads = ops.shape(query)[1], query.shape[2]
    keys = key.shape[1] if isinstance(key.shape[1], int) else USUAL_KEYS
    floats = heads * max(1, keys)
    if not fused:
        floats *= -(-query.shape[3] // SLOTS)
    size, chunks, tiles = chunk_layout(length, chunk_size, query.shape[0], floats)
    xs = (query,)
    if causal:
        last_seen = ops.arange(length, dtype="int32") + ops.cast(
            first_position, "int32"
        )
        xs += (ops.cast(last_seen, dtype)[None],)
    xs = tuple(pad_to(x, tiles * chunks * size) for x in xs)
    consts = (ops.transpose(value, (0, 2, 1, 3)),)
    consts += () if valid is None else (valid,)
    consts += with_sines(split_dims(key), fused)
    step, gradient = _step(power, causal, valid is not None, fused)
    if keras.backend.backend() == "jax":
        # XLA makes the same of the automatic one, which has a derivative.
        gradient = None
    _, sums = recompute_scan(step, (), xs, consts, gradient, num_steps=tiles)
    return tuple(y[:, :length] for y in sums)


@functools.cache
def _step(power, causal, masked, fused):
    """`(step, gradient)` for `recompute_scan`, one object per configuration.

    `x` is the queries and, if `causal`, the index of the last key that each sees; the
    constants are the values, if `masked` 1 for keys that exist and 0 for others, and
    the keys `with_sines`.
    """
    first = 2 if masked else 1

    def logits(query, x, consts):
        logs = power * log_kernel(query, consts[first:])
        if masked:
            logs = ops.where(consts[1][:, None, None, :] > 0, logs, LOG_ZERO)
        if causal:
            columns = ops.arange(ops.shape(logs)[-1], dtype=x[1].dtype)
            allowed = columns <= x[1][:, None, :, None]
            logs = ops.where(allowed, logs, LOG_ZERO)
        return logs

    def weights_of(logs, scale):
        return ops.where(logs > LOG_ZERO, ops.exp(logs - scale[..., None]), 0.0)

    def step(carry, x, consts):
        logs = logits(with_sines(split_dims(x[0]), fused), x, consts)
        scale = ops.max(ops.stop_gradient(logs), axis=-1, initial=LOG_ZERO)
        weights = weights_of(logs, scale)
        values = ops.transpose(weights @ consts[0], (0, 2, 1, 3))
        totals = ops.sum(weights, axis=-1)
        return carry, (values, *(ops.swapaxes(t, 1, 2) for t in (totals, scale)))

    def gradient(carry, x, consts, y, carry_gradient, y_gradient):
        query, value = with_sines(split_dims(x[0]), fused), consts[0]
        scale = ops.swapaxes(y[2], 1, 2)
        weights = weights_of(logits(query, x, consts), scale)
        of_values = ops.transpose(y_gradient[0], (0, 2, 1, 3))
        of_totals = ops.swapaxes(y_gradient[1], 1, 2)[..., None]
        of_weights = of_values @ ops.swapaxes(value, -1, -2) + of_totals
        of_logs = power * (of_weights * weights)
        of_query, of_key = log_kernel_gradient(query, consts[first:], of_logs)
        of_value = ops.swapaxes(weights, -1, -2) @ of_values
        of_x = (join_dims(of_query, x[0].shape[-1]), *map(ops.zeros_like, x[1:]))
        of_valid, of_sines = consts[1:first], consts[first + 1 :]
        of_valid, of_sines = (map(ops.zeros_like, t) for t in (of_valid, of_sines))
        return (), of_x, (of_value, *of_valid, of_key, *of_sines)

    return step, gradient
