"""Attention with a span in Pallas kernels, on one TPU.

A program has one block of queries and reads all blocks of keys in their window; in the
gradients of keys and values, one block of keys and all blocks of queries that see it.
Matrices have a row for each key and a column for each query. On other devices Pallas
interprets the kernels: the same results, slowly, for tests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.adaptive_span.bands import SpanConfig
from keras_efficient_attn.ops.common.chunking import chunk_count, fit_length
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, reciprocal

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
        length: Positions, a multiple of `BLOCK`.
        heads: Number of heads.
    """

    config: SpanConfig
    causal: bool
    length: int
    heads: int

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
    plan = Plan(config, options.causal, padded, heads)
    dtypes = {str(x.dtype) for x in (query, key, value)}
    too_large = len(plan.offsets) > MOST_BLOCKS or max(dim, value.shape[-1]) > MOST_DIM
    if too_large or len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return None
    query = (query.astype("float32") * options.scale).astype(query.dtype)
    exists = jnp.ones(key.shape[:2]) if key_mask is None else key_mask
    exists = fit_length(exists.astype("float32"), padded)[..., None]
    if spans.ndim == 1:
        spans = jnp.broadcast_to(spans, (batch, length, heads))
    spans = fit_length(spans.astype("float32"), padded)
    spans = jnp.swapaxes(spans, 1, 2).reshape(batch * heads, 1, padded)
    tensors = (_by_head(x, padded) for x in (query, key, value))
    output = _attend(plan, *tensors, exists, spans)
    output = output.reshape(batch, heads, padded, -1)[:, :, :length]
    return jnp.swapaxes(output, 1, 2)


def _by_head(x, length):
    """`(batch, length, heads, dim)` as `(batch · heads, length, dim)`."""
    x = jnp.swapaxes(fit_length(x, length), 1, 2)
    return x.reshape(-1, *x.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, query, key, value, exists, spans):
    """The output, in the layout of the tensors.

    Args:
        plan: `Plan`.
        query, key, value: `(batch · heads, length, dim)`, the query scaled.
        exists: `(batch, length, 1)`, positive for keys that exist.
        spans: `(batch · heads, 1, length)`.
    """
    return _forward(plan, query, key, value, exists, spans)[0]


def _forward(plan, query, key, value, exists, spans):
    inputs = [query, spans], [key, value, exists]
    outputs = [
        jax.ShapeDtypeStruct((*query.shape[:2], value.shape[-1]), value.dtype),
        jax.ShapeDtypeStruct(spans.shape, jnp.float32),
    ]
    output, log_total = _call(plan, span_forward, inputs, plan.offsets, outputs)
    return output, (query, key, value, exists, spans, output, log_total)


def _backward(plan, kept, grad):
    query, key, value, exists, spans, output, log_total = kept
    mean = jnp.sum(output.astype("float32") * grad, axis=-1)[:, None]
    queries, keys = [query, spans, log_total, mean, grad], [key, value, exists]
    grad_query, grad_spans = _call(
        plan, span_query_gradient, (queries, keys), plan.offsets, [query, spans]
    )
    seen_by = [-offset for offset in plan.offsets]
    grad_key, grad_value = _call(
        plan, span_key_gradient, (keys, queries), seen_by, [key, value]
    )
    return grad_query, grad_key, grad_value, None, grad_spans


_attend.defvjp(_forward, _backward)


def _call(plan, kernel, inputs, offsets, outputs):
    """Runs a kernel over the blocks of all heads.

    Args:
        plan: `Plan`.
        kernel: Called with `plan`, the block's number, its blocks of the first inputs,
            pairs of an offset and the blocks of the second inputs there, and references
            of the outputs.
        inputs: Two lists of tensors.
        offsets: Where the second inputs are read, from the block on.
        outputs: Tensors of the shapes and dtypes of the outputs.
    """
    own, others = inputs
    specs = [_spec(plan, x) for x in own]
    specs += [_spec(plan, x, offset) for offset in offsets for x in others]
    tensors = [*own, *(x for _ in offsets for x in others)]

    def body(*references):
        blocks = [r[...] for r in references[: len(tensors)]]
        first, rest = blocks[: len(own)], blocks[len(own) :]
        number = pl.program_id(1)
        seen = [
            (offset, rest[i * len(others) : (i + 1) * len(others)])
            for i, offset in enumerate(offsets)
        ]
        kernel(plan, number, first, seen, references[len(tensors) :])

    def run(tensors, interpret):
        return pl.pallas_call(
            body,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
            grid=(outputs[0].shape[0], plan.blocks),
            in_specs=specs,
            out_specs=[_spec(plan, x) for x in outputs],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary")
            ),
            interpret=interpret,
            name=kernel.__name__,
        )(*tensors)

    return lax.platform_dependent(
        tensors, tpu=lambda x: run(x, False), default=lambda x: run(x, True)
    )


def _spec(plan, x, offset=0):
    """The block of a tensor at an offset; blocks beyond the ends are masked later."""

    def at(i):
        return jnp.clip(i + offset, 0, plan.blocks - 1)

    if x.shape[1] == 1:
        return pl.BlockSpec((None, 1, BLOCK), lambda row, i: (row, 0, at(i)))
    if x.shape[-1] == 1:
        # One for all heads. To lower `//`, Pallas would look for a TPU.
        block = None, BLOCK, 1
        return pl.BlockSpec(block, lambda row, i: (lax.div(row, plan.heads), at(i), 0))
    return pl.BlockSpec((None, BLOCK, x.shape[-1]), lambda row, i: (row, at(i), 0))


def span_forward(plan, number, queries, seen, outputs):
    query, spans = queries
    parts, largest = [], LOG_ZERO
    for offset, (key, value, exists) in seen:
        mask, allowed = _mask(plan, number, number + offset, spans, exists)
        logits = jnp.where(allowed, _dot(key, query, (1, 1)), LOG_ZERO)
        largest = jnp.maximum(largest, jnp.max(logits, axis=0, keepdims=True))
        parts.append((logits, mask, value))
    weights = [mask * jnp.exp(logits - largest) for logits, mask, _ in parts]
    total = sum(jnp.sum(w, axis=0, keepdims=True) for w in weights)
    share = reciprocal(total)
    output, log_total = outputs
    output[...] = sum(
        _dot((w * share).astype(value.dtype), value, (0, 0))
        for w, (_, _, value) in zip(weights, parts, strict=True)
    ).astype(output.dtype)
    # Without keys, all weights are zero.
    logarithm = jnp.log(jnp.where(total > 0, total, 1)) + largest
    log_total[...] = jnp.where(total > 0, logarithm, -LOG_ZERO)


def span_query_gradient(plan, number, queries, seen, outputs):
    query, spans, *rest = queries
    grad_query, grad_spans = 0.0, 0.0
    for offset, (key, value, exists) in seen:
        mask, _, on_ramp, grad = _gradient(
            plan, (number, number + offset), (query, spans, *rest), (key, value, exists)
        )
        grad_spans += jnp.sum(on_ramp * grad, axis=0, keepdims=True)
        grad_query += _dot((mask * grad).astype(key.dtype), key, (0, 0))
    outputs[0][...] = grad_query.astype(outputs[0].dtype)
    outputs[1][...] = grad_spans / plan.config.ramp


def span_key_gradient(plan, number, keys, seen, outputs):
    grad_key, grad_value = 0.0, 0.0
    for offset, queries in seen:
        mask, exponentials, _, grad = _gradient(
            plan, (number + offset, number), queries, keys
        )
        query, grad_output = queries[0], queries[-1]
        grad_key += _dot((mask * grad).astype(query.dtype), query, (1, 0))
        weights = (mask * exponentials).astype(grad_output.dtype)
        grad_value += _dot(weights, grad_output, (1, 0))
    outputs[0][...] = grad_key.astype(outputs[0].dtype)
    outputs[1][...] = grad_value.astype(outputs[1].dtype)


def _gradient(plan, numbers, queries, keys):
    """`(mask, exponentials, on_ramp, grad)` of a block of queries and one of keys.

    The weights are the mask times the exponentials; the gradient is that of the mask.
    Times the mask it is that of the logits.
    """
    query, spans, log_total, mean, grad_output = queries
    key, value, exists = keys
    mask, allowed = _mask(plan, *numbers, spans, exists)
    logits = jnp.where(allowed, _dot(key, query, (1, 1)), LOG_ZERO)
    exponentials = jnp.exp(logits - log_total)
    grad = exponentials * (_dot(value, grad_output, (1, 1)) - mean)
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


def _dot(a, b, contract):
    """A product of matrices that contracts one axis of each."""
    dims = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
