"""Softmax over intervals of the keys by splash attention, JAX's kernel for TPUs.

On other devices Pallas interprets it: the same results, slowly, for tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from keras_efficient_attn.ops.common import private_jax
from keras_efficient_attn.ops.common.devices_jax import run_on_devices
from keras_efficient_attn.ops.common.interval_softmax.intervals import (
    interleave,
    sequences,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, finish, merge

# Lanes of a vector register: blocks are multiples of it.
LANES = 128
# Queries and keys of a block.
BLOCK = 512


def attend(query, key, value, valid, pattern, scale):
    """The output of softmax attention; see `choice.choose_kernel`."""
    inputs, seen, cut = _prepare(_scale(query, scale), key, value, valid, pattern)
    output = _by_position(_run(_output, cut, *inputs), query.shape)
    # Queries without keys get averages over their blocks.
    return jnp.where(seen[..., None], output, 0)


def attend_part(query, key, value, valid, pattern, scale):
    """Computes `attend` as `(values, totals, log_scale)` for `online_softmax.merge`."""
    inputs, seen, cut = _prepare(_scale(query, scale), key, value, valid, pattern)
    values, log_scale = (_by_position(t, query.shape) for t in _part(cut, *inputs))
    return (
        jnp.where(seen[..., None], values, 0),
        jnp.broadcast_to(seen, log_scale.shape).astype("float32"),
        jnp.where(seen, log_scale, LOG_ZERO),
    )


def attend_interleaved(query, key, value, valid, parts, scale):
    """The output over several parts of the keys; see `choice.choose_kernel`."""
    return _attend_interleaved(parts, _scale(query, scale), key, value, valid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_interleaved(parts, *inputs):
    return _interleaved_forward(parts, *inputs)[0]


def _interleaved_forward(parts, *inputs):
    results = []
    for step, pattern in parts:
        part = attend_part(*sequences(step, *inputs), pattern, 1.0)
        results.append(interleave(step, *part))
    values, totals, log_scale = merge(results)
    output = finish(values, totals, log_scale, True).astype(inputs[2].dtype)
    seen = totals > 0.0
    log_scale = log_scale + jnp.log(jnp.where(seen, totals, 1.0))
    return output, (inputs, output, log_scale, seen)


def _interleaved_backward(parts, kept, grad):
    """The gradient of each part, whose weights are those of the whole softmax."""
    inputs, output, log_scale, seen = kept
    grad = jnp.where(seen[..., None], grad, 0)
    mean = jnp.sum(output.astype("float32") * grad, axis=-1)
    grads = []
    for step, pattern in parts:
        *tensors, valid = sequences(step, *inputs)
        kernel_inputs, _, cut = _prepare(*tensors, valid, pattern)
        numbers = sequences(step, log_scale, grad, mean)
        rows = (_one_head(x, cut[-1][0]) for x in numbers)
        *results, _ = _run(_input_gradients, cut, *kernel_inputs, *rows)
        shapes = (x.shape for x in tensors)
        grads.append(interleave(step, *map(_by_position, results, shapes)))
    return *(sum(same) for same in zip(*grads, strict=True)), None


_attend_interleaved.defvjp(_interleaved_forward, _interleaved_backward)


def _scale(query, scale):
    # The kernel multiplies in the inputs' dtype, so scale the queries before the cast.
    return (query.astype("float32") * scale).astype(query.dtype)


def _prepare(query, key, value, valid, pattern):
    """The kernel's inputs, which queries see keys, and the arguments of `_kernel`."""
    batch, length, heads, _ = query.shape
    rows, key_rows = _pad(length), _pad(key.shape[1])
    query = _one_head(query, rows)
    key, value = _one_head(key, key_rows), _one_head(value, key_rows)
    cut = pattern, length, (rows, key_rows)
    if valid is None:
        seen = _has_keys(pattern, length)[None, :, None]
        return (query, key, value, None), seen, cut
    valid = jnp.broadcast_to(
        valid[..., None] if valid.ndim == 2 else valid, (*valid.shape[:2], heads)
    )
    valid = jnp.swapaxes(valid != 0, 1, 2)
    seen = jnp.swapaxes(_sees_any(pattern, length, valid), 1, 2)
    hidden = jnp.pad(~valid, ((0, 0), (0, 0), (0, key_rows - valid.shape[-1])))
    ids = splash_attention_kernel.SegmentIds(
        jnp.zeros((batch, heads, rows), "int32"), hidden.astype("int32")
    )
    return (query, key, value, ids), seen, cut


def _by_position(x, shape):
    """`(batch, heads, 1, rows, ...)` as `(batch, length, heads, ...)`."""
    return jnp.swapaxes(x[:, :, 0, : shape[1]], 1, 2)


def _run(compute, cut, *tensors):
    """`compute(kernel, *tensors)` for each head of each row, on the device's kernel."""

    def run(batch, heads, tensors):
        def by_head(interpret, tensors):
            compute_one = functools.partial(compute, _kernel(*cut, interpret))
            return jax.vmap(compute_one)(*tensors)

        merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tensors)
        results = lax.platform_dependent(
            merged,
            tpu=functools.partial(by_head, False),
            default=functools.partial(by_head, True),
        )
        return jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[1:]), results)

    return run_on_devices(run, *tensors[0].shape[:2], tensors)


def _output(kernel, *inputs):
    return kernel(*inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _part(cut, *inputs):
    """Outputs and log-sum-exps. The kernel's own gradient excludes the latter."""
    return _run(_output_and_log_scale, cut, *inputs)


def _output_and_log_scale(kernel, *inputs):
    kernel = splash_attention_kernel.SplashAttentionKernel(
        kernel.fwd_mask_info, None, None, **{**kernel.kwargs, "save_residuals": True}
    )
    output, (log_scale,) = kernel(*inputs)
    return output, log_scale


def _part_forward(cut, *inputs):
    outputs = _part(cut, *inputs)
    return outputs, (inputs, outputs)


def _part_backward(cut, kept, grads):
    inputs, (output, log_scale) = kept
    grad_output, grad_scale = grads
    # The kernels subtract this from the gradient of every weight.
    mean = jnp.sum(output.astype("float32") * grad_output, axis=-1) - grad_scale
    return _run(_input_gradients, cut, *inputs, log_scale, grad_output, mean)


def _input_gradients(kernel, query, key, value, ids, log_scale, grad, mean):
    """The gradients of `inputs`, by JAX's functions, which are not public."""
    options, sinks = kernel.kwargs, None
    sizes = options["block_sizes"]
    inputs = query, key, value, ids, sinks, log_scale, grad, mean
    names = "is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret"
    common = {name: options[name] for name in names}
    layouts = "q_layout", "k_layout", "v_layout"
    common |= {name: getattr(sizes, name) for name in layouts}
    grad_query = private_jax.query_gradient(
        *inputs,
        bq=sizes.block_q_dq,
        bkv=sizes.block_kv_dq,
        mask_info=kernel.dq_mask_info,
        **common,
    )
    _, *grads = private_jax.key_value_gradients(
        *inputs,
        bq=sizes.block_q_dkv,
        bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=False,
        **common,
    )
    return grad_query, *grads, None


_part.defvjp(_part_forward, _part_backward)


def _pad(length):
    unit = LANES if length < BLOCK else BLOCK
    return -(-length // unit) * unit


def _one_head(x, rows):
    """`(batch, length, heads, ...)` as `(batch, heads, 1, rows, ...)`, zero-padded.

    Heads see the same keys: the kernel has one mask, and programs for each head.
    """
    _, length, _, *tail = x.shape
    padding = (0, 0), (0, 0), (0, rows - length), *((0, 0) for _ in tail)
    return jnp.pad(jnp.swapaxes(x, 1, 2), padding)[:, :, None]


@functools.lru_cache(maxsize=64)
def _kernel(pattern, queries, rows, interpret):
    mask = splash_attention_mask.MultiHeadMask([_Mask(pattern, queries, rows)])
    block, key_block = (min(BLOCK, size) for size in rows)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=key_block,
        block_q_dkv=block,
        block_kv_dkv=key_block,
        block_q_dq=block,
        block_kv_dq=key_block,
    )
    # Lists of blocks are constants, even if the caller is being traced.
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha_single_device(
            mask, block_sizes=sizes, interpret=interpret
        )


class _Mask(splash_attention_mask.Mask):
    """A pattern for splash attention, which reads it block by block."""

    def __init__(self, pattern, queries, shape):
        self._bounds = _bounds(pattern, queries)
        self._shape = shape

    @property
    def shape(self):
        return self._shape

    def __getitem__(self, index):
        (start, stop, _), (first_key, end, _) = (
            part.indices(size) for part, size in zip(index, self._shape, strict=True)
        )
        block = np.zeros((stop - start, end - first_key), bool)
        for first, last in self._bounds[:, :, start:stop]:
            # Padding queries see nothing.
            if len(first) and first.min() < end and last.max() >= first_key:
                keys = np.arange(first_key, end)
                seen = (keys >= first[:, None]) & (keys <= last[:, None])
                block[: len(first)] |= seen
        return block


def _bounds(pattern, queries):
    """First and last keys of the intervals, `(intervals, 2, queries)`, in NumPy.

    Inside `[0, keys]` and `[-1, keys - 1]`: empty intervals end before they begin.
    """
    i = np.arange(queries)
    pairs = np.stack(
        [
            [np.broadcast_to(end, i.shape) for end in pair]
            for pair in pattern.intervals(i)
        ]
    )
    first = np.clip(pairs[:, 0], 0, pattern.keys)
    last = np.clip(pairs[:, 1], -1, pattern.keys - 1)
    return np.stack([first, np.maximum(last, first - 1)], axis=1)


def _has_keys(pattern, queries):
    first, last = np.moveaxis(_bounds(pattern, queries), 1, 0)
    return (last >= first).any(axis=0)


def _sees_any(pattern, queries, valid):
    """`(batch, heads, queries)`, from `valid` `(batch, heads, keys)`."""
    counts = jnp.cumsum(valid, axis=-1, dtype="int32")
    counts = jnp.pad(counts, ((0, 0), (0, 0), (1, 0)))
    first, last = np.moveaxis(_bounds(pattern, queries), 1, 0)
    return (counts[..., last + 1] > counts[..., first]).any(axis=-2)
