"""Fourier attention a tile of queries at a time, in memory linear in the length."""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import (
    backend_module,
    in_function_transform,
    shape_of,
)
from keras_efficient_attn.ops.common.chunking import chunk_layout, pad_to
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, max_along, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.plan import jit_on_jax
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.fourier.kernel import (
    SLOTS,
    join_dims,
    split_dims,
)

_kernels = backend_module("keras_efficient_attn.ops.fourier.kernels")
# Assumed number of keys if it is not known statically.
USUAL_KEYS = 1024


@jit_on_jax("config")
def fourier_sums(
    tensors, radius, config, key_mask=None, first_position=0, documents=None
):
    """The sums of `fourier_attention`, relative to the largest weight of each query.

    Args:
        tensors: `(query, key, value)`.
        radius, key_mask, first_position: As for `fourier_attention`.
        config: `FourierConfig`, for any implementation but the reference.
        documents: The `Documents` of queries and keys. Defaults to `None`: one in each
            row.

    Returns:
        `(values, totals, log_scale)` of shapes `(batch, length, heads, value_dim)` and
        `(batch, length, heads)`: a part for `online_softmax.merge`.
    """
    query, key, value = tensors
    dtype = accumulator_dtype(query, key, value)
    valid = None
    if key_mask is not None:
        key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
        valid = ops.cast(key_mask, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    radius = ops.cast(radius, dtype)
    query, key = query * radius, key * radius

    length, heads = shape_of(query)[1], query.shape[2]
    keys = key.shape[1] if isinstance(key.shape[1], int) else USUAL_KEYS
    floats = heads * max(1, keys)
    if not config.is_fused:
        floats *= -(-query.shape[3] // SLOTS)
    size, chunks, tiles = chunk_layout(length, config.tile_size, query.shape[0], floats)
    xs, steps = (query,), ops.arange(length, dtype="int32")
    if documents is not None:
        later = 0 if config.causal else documents.later
        xs += (steps + later + 0 * documents.later, steps - documents.position)
    elif config.causal:
        first = ops.reshape(ops.cast(first_position, "int32"), (-1, 1))
        xs += (first + steps,)
    xs = tuple(pad_to(x, tiles * chunks * size) for x in xs)
    consts = (ops.transpose(value, (0, 2, 1, 3)),)
    consts += () if valid is None else (valid,)
    kernel = _kernel(config)
    consts += kernel.prepare(split_dims(key))
    step, gradient = _step(config, kernel, valid is not None, len(xs) - 1)
    _, sums = recompute_scan(step, (), xs, consts, gradient, num_steps=tiles)
    return tuple(y[:, :length] for y in sums)


def _kernel(config):
    if in_function_transform():
        return _kernels.PLAIN
    return _kernels.FUSED if config.is_fused else _kernels.KERNEL


@functools.cache
def _step(config, kernel, masked, bounds):
    """`(step, gradient)` for `recompute_scan`, one object per configuration.

    `x` holds the queries and `bounds` indices of the last and the first key that each
    sees. The constants are the values; if `masked`, 1 for keys that exist and 0 for
    others; and the kernel's arrays of keys.
    """
    power = config.power
    first = 2 if masked else 1

    def logits(query, x, consts):
        logs = power * kernel.log_kernel(query, consts[first:])
        if masked:
            logs = where(consts[1][:, None, None, :] > 0, logs, LOG_ZERO)
        columns = ops.arange(shape_of(logs)[-1], dtype="int32")
        if bounds > 0:
            allowed = columns <= x[1][:, None, :, None]
            logs = where(allowed, logs, LOG_ZERO)
        if bounds > 1:
            allowed = columns >= x[2][:, None, :, None]
            logs = where(allowed, logs, LOG_ZERO)
        return logs

    def weights_of(logs, scale):
        return ops.where(logs > LOG_ZERO, ops.exp(logs - scale[..., None]), 0.0)

    def step(carry, x, consts):
        logs = logits(kernel.prepare(split_dims(x[0])), x, consts)
        scale = max_along(ops.stop_gradient(logs), axis=-1, initial=LOG_ZERO)
        weights = weights_of(logs, scale)
        values = ops.transpose(weights @ consts[0], (0, 2, 1, 3))
        totals = ops.sum(weights, axis=-1)
        return carry, (values, *(ops.swapaxes(t, 1, 2) for t in (totals, scale)))

    def gradient(carry, x, consts, y, carry_gradient, y_gradient):
        query, value = kernel.prepare(split_dims(x[0])), consts[0]
        scale = ops.swapaxes(y[2], 1, 2)
        weights = weights_of(logits(query, x, consts), scale)
        grad_sums = ops.transpose(y_gradient[0], (0, 2, 1, 3))
        grad_totals = ops.swapaxes(y_gradient[1], 1, 2)[..., None]
        grad_weights = grad_sums @ ops.swapaxes(value, -1, -2) + grad_totals
        grad_logs = power * (grad_weights * weights)
        grad_query, grad_key = kernel.log_kernel_gradient(
            query, consts[first:], grad_logs
        )
        grad_value = ops.swapaxes(weights, -1, -2) @ grad_sums
        grad_query = join_dims(grad_query, x[0].shape[-1])
        grad_valid = map(ops.zeros_like, consts[1:first])
        grad_sines = map(ops.zeros_like, consts[first + 1 :])
        grad_consts = (grad_value, *grad_valid, grad_key, *grad_sines)
        return (), (grad_query, *map(ops.zeros_like, x[1:])), grad_consts

    return step, gradient if kernel.log_kernel_gradient is not None else None
