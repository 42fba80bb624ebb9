"""Attention with a span in Pallas kernels for TPUs.

A program has one block of queries and reads all blocks of keys in their window; in the
gradients of keys and values, one block of keys and all blocks of queries that see it.
Matrices have a row for each key and a column for each query.

By the compiler's estimate for a TPU v5e, a whole layer takes with these kernels and in
blocks (causal, window 1,024, 16,384 positions, 4 heads of 64, 2026-11-28; bfloat16):
0.91 and 2.56 ms forward, 2.8 and 8.6 ms in training, and 4.3 and 15.1 ms in training
without causality, each with the kernels' schedules:

    python -m tools.compile_for_tpu --layers adaptive-span --lengths 16384 --heads 4 \\
        --head-dim 64 --dtype mixed_bfloat16 --causal --mode train

and for the blocks the same with `XLA_FLAGS=--xla_force_host_platform_device_count=2`,
because without one device no kernel is planned. JAX's splash attention cannot replace
them: its masks have no gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from keras_efficient_attn.ops.adaptive_span.bands import SpanConfig
from keras_efficient_attn.ops.common import pallas_grid
from keras_efficient_attn.ops.common.chunking import chunk_count, fit_length
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, reciprocal
from keras_efficient_attn.ops.common.pallas_grid import dot, to_row

# Queries and keys of a block.
BLOCK = 256
# A program holds the weights of all its blocks.
MOST_BLOCKS = 9
MOST_DIM = 256
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes and options of a call.

    Attributes:
        config: `SpanConfig`.
        causal: Whether queries see no later keys.
        batch, heads: Sizes.
        length: Positions, a multiple of `BLOCK`.
    """

    config: SpanConfig
    causal: bool
    batch: int
    heads: int
    length: int

    @property
    def offsets(self):
        """The blocks of keys that a block of queries sees, from its own position."""
        before = chunk_count(self.config.window - 1, BLOCK)
        return range(-before, 1 if self.causal else before + 1)

    @property
    def blocks(self):
        return self.length // BLOCK


def attend(query, key, value, key_mask, spans, config, options):
    """The output of `adaptive_span_attention`, or `None` if no kernel can compute it.

    Args:
        query, key, value: `(batch, length, heads, dim)`, the last two finite.
        key_mask: `(batch, key_length)` or `None`.
        spans: `(heads,)`, or `(batch, query_length, heads)`.
        config: `SpanConfig`.
        options: `SoftmaxOptions`.
    """
    shapes = query.shape, key.shape, value.shape
    if not all(isinstance(size, int) and size > 0 for s in shapes for size in s):
        return None
    batch, length, heads, dim = query.shape
    longest = max(length, key.shape[1])
    config = dataclasses.replace(config, window=min(config.window, longest))
    padded = chunk_count(longest, BLOCK) * BLOCK
    plan = Plan(config, options.causal, batch, heads, padded)
    dtypes = {str(x.dtype) for x in (query, key, value)}
    too_large = len(plan.offsets) > MOST_BLOCKS or max(dim, value.shape[-1]) > MOST_DIM
    if too_large or len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return None
    query = (query.astype("float32") * options.scale).astype(query.dtype)
    exists = jnp.ones(key.shape[:2]) if key_mask is None else key_mask
    exists = fit_length(exists.astype("float32"), padded)[:, None, :, None]
    if spans.ndim == 1:
        spans = jnp.broadcast_to(spans, (batch, length, heads))
    tensors = (jnp.swapaxes(fit_length(x, padded), 1, 2) for x in (query, key, value))
    output = _attend(plan, *tensors, exists, to_row(fit_length(spans, padded)))
    return jnp.swapaxes(output[:, :, :length], 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, query, key, value, exists, spans):
    """The output, in the layout of the tensors.

    Args:
        plan: `Plan`.
        query, key, value: `(batch, heads, length, dim)`, the query scaled.
        exists: `(batch, 1, length, 1)`, positive for keys that exist.
        spans: `(batch, heads, 1, length)`.
    """
    return _forward(plan, query, key, value, exists, spans)[0]


def _forward(plan, query, key, value, exists, spans):
    inputs = (query, spans), (key, value, exists)
    shape = (*query.shape[:3], value.shape[-1])
    outputs = {
        "output": jax.ShapeDtypeStruct(shape, value.dtype),
        "log_total": spans,
    }
    outputs = _call(plan, span_forward, inputs, plan.offsets, outputs)
    return outputs["output"], (query, key, value, exists, spans, outputs)


def _backward(plan, kept, grad):
    query, key, value, exists, spans, outputs = kept
    mean = jnp.sum(outputs["output"].astype("float32") * grad, axis=-1)[:, :, None]
    queries, keys = (
        (query, spans, outputs["log_total"], mean, grad),
        (key, value, exists),
    )
    grads = _call(
        plan,
        span_query_gradient,
        (queries, keys),
        plan.offsets,
        {"query": query, "spans": spans},
    )
    seen_by = [-offset for offset in plan.offsets]
    grads |= _call(
        plan, span_key_gradient, (keys, queries), seen_by, {"key": key, "value": value}
    )
    return grads["query"], grads["key"], grads["value"], None, grads["spans"]


_attend.defvjp(_forward, _backward)


def _call(plan, kernel, inputs, offsets, outputs):
    """The outputs of a kernel for all blocks of all heads.

    Args:
        plan: `Plan`.
        kernel: Called with `plan`, `(blocks of the first inputs, a list of blocks of
            the second inputs for each offset)`, and the outputs; all references.
        inputs: Two tuples of tensors.
        offsets: Where the second inputs are read, from the block on.
        outputs: Dict of tensors of the shapes and dtypes of the outputs.
    """
    own, others = inputs

    def specs(tensors, offset=0):
        def at(i):
            # Blocks beyond the ends are masked later.
            return jnp.clip(i + offset, 0, plan.blocks - 1)

        def spec(x):
            make = pallas_grid.row if x.shape[2] == 1 else pallas_grid.positions
            return make(x, BLOCK, at)

        return jax.tree.map(spec, tensors)

    return pallas_grid.call(
        plan,
        kernel,
        (own, [others for _ in offsets]),
        outputs,
        ((specs(own), [specs(others, offset) for offset in offsets]), specs(outputs)),
    )


def _load(inputs):
    return jax.tree.map(lambda reference: reference[...], inputs)


def span_forward(plan, inputs, outputs):
    (query, spans), seen = _load(inputs)
    number = pl.program_id(2)
    parts, largest = [], LOG_ZERO
    for offset, (key, value, exists) in zip(plan.offsets, seen, strict=True):
        mask, allowed = _mask(plan, number, number + offset, spans, exists)
        logits = jnp.where(allowed, dot(key, query, (1, 1)), LOG_ZERO)
        largest = jnp.maximum(largest, jnp.max(logits, axis=0, keepdims=True))
        parts.append((logits, mask, value))
    weights = [mask * jnp.exp(logits - largest) for logits, mask, _ in parts]
    total = sum(jnp.sum(w, axis=0, keepdims=True) for w in weights)
    share = reciprocal(total)
    output = outputs["output"]
    output[...] = sum(
        dot((w * share).astype(value.dtype), value, (0, 0))
        for w, (_, _, value) in zip(weights, parts, strict=True)
    ).astype(output.dtype)
    # Without keys, all weights are zero.
    logarithm = jnp.log(jnp.where(total > 0, total, 1)) + largest
    outputs["log_total"][...] = jnp.where(total > 0, logarithm, -LOG_ZERO)


def span_query_gradient(plan, inputs, outputs):
    queries, seen = _load(inputs)
    query, number = queries[0], pl.program_id(2)
    grad_query, grad_spans = 0.0, 0.0
    for offset, keys in zip(plan.offsets, seen, strict=True):
        mask, _, on_ramp, grad = _gradient(
            plan, (number, number + offset), queries, keys
        )
        key = keys[0]
        grad_spans += jnp.sum(on_ramp * grad, axis=0, keepdims=True)
        grad_query += dot((mask * grad).astype(key.dtype), key, (0, 0))
    outputs["query"][...] = grad_query.astype(query.dtype)
    outputs["spans"][...] = grad_spans / plan.config.ramp


def span_key_gradient(plan, inputs, outputs):
    keys, seen = _load(inputs)
    number = pl.program_id(2)
    grad_key, grad_value = 0.0, 0.0
    for offset, queries in zip(plan.offsets, seen, strict=True):
        mask, exponentials, _, grad = _gradient(
            plan, (number - offset, number), queries, keys
        )
        query, grad_output = queries[0], queries[-1]
        grad_key += dot((mask * grad).astype(query.dtype), query, (1, 0))
        weights = (mask * exponentials).astype(grad_output.dtype)
        grad_value += dot(weights, grad_output, (1, 0))
    key, value, _ = keys
    outputs["key"][...] = grad_key.astype(key.dtype)
    outputs["value"][...] = grad_value.astype(value.dtype)


def _gradient(plan, numbers, queries, keys):
    """`(mask, exponentials, on_ramp, grad)` of a block of queries and one of keys.

    The weights are the mask times the exponentials; the gradient is that of the mask.
    Times the mask it is that of the logits.
    """
    query, spans, log_total, mean, grad_output = queries
    key, value, exists = keys
    mask, allowed = _mask(plan, *numbers, spans, exists)
    logits = jnp.where(allowed, dot(key, query, (1, 1)), LOG_ZERO)
    exponentials = jnp.exp(logits - log_total)
    grad = exponentials * (dot(value, grad_output, (1, 1)) - mean)
    return mask, exponentials, (mask > 0) & (mask < 1), grad


def _mask(plan, query_block, key_block, spans, exists):
    """The soft mask of pairs, and whether the query sees the key."""
    shape, config = (BLOCK, BLOCK), plan.config
    key = key_block * BLOCK + lax.broadcasted_iota("int32", shape, 0)
    query = query_block * BLOCK + lax.broadcasted_iota("int32", shape, 1)
    distance = jnp.abs(query - key)
    mask = (config.ramp + spans - distance.astype("float32")) / config.ramp
    mask = jnp.clip(mask, 0.0, 1.0)
    allowed = (mask > 0) & (distance < config.window) & (exists > 0)
    inside = (jnp.minimum(key, query) >= 0) & (jnp.maximum(key, query) < plan.length)
    allowed = allowed & inside
    if plan.causal:
        allowed = allowed & (query >= key)
    if not config.include_self:
        allowed = allowed & (distance > 0)
    return jnp.where(allowed, mask, 0.0), allowed
