"""Attention with relative positions for whole segments, a few queries at a time."""

import dataclasses
import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import (
    scan_groups,
    softmax_part,
)
from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_int,
    check_positive_int,
)
from keras_efficient_attn.ops.common.chunking import (
    chunk_layout,
    pad_length,
    pad_to,
)
from keras_efficient_attn.ops.common.inputs import masked_inputs
from keras_efficient_attn.ops.common.online_softmax import divide
from keras_efficient_attn.ops.common.plan import block_sizes, jit_on_jax
from keras_efficient_attn.ops.common.positions import shifted_by_query
from keras_efficient_attn.ops.common.single_query import attend_single


@jit_on_jax("config", "options")
def attend_in_tiles(inputs, position_key, biases, documents, seed, config, options):
    """The output `(batch, query_length, heads, value_dim)`.

    The matrix of weights exists for a few queries at a time and is recomputed for
    gradients.

    Args:
        inputs: `(query, key, value, key_mask)`.
        position_key, documents: As for `relative_attention`.
        biases: Pair of `(heads, dim)` or `None`: added to queries for their products
            with keys and with `position_key`.
        seed: Seed of the dropout, or `None`.
        config: `RelativeConfig`.
        options: `SoftmaxOptions`.
    """
    query, key, value, valid = masked_inputs(*inputs)
    query, position_query = biased_queries(query, biases, options.scale)
    offset, causal = config.offset, options.causal
    length, keys, heads = shape_of(query)[1], shape_of(key)[1], query.shape[2]
    dtype = query.dtype
    position_key = ops.cast(position_key, dtype)
    plan = block_sizes()
    floats = plan.step_floats // plan.block
    if isinstance(keys, int):
        floats = heads * 4 * max(1, keys)
    size, chunks, groups = chunk_layout(length, plan.block, query.shape[0], floats)
    size = size * chunks

    # The first query of the last group is the first row's; keys that no query sees are
    # skipped.
    after = keys - offset if causal else 1
    position_key = pad_length(position_key[None], groups * size - length, after)[0]
    positions = (ops.arange(length, dtype="int32") + offset)[None]
    xs = [query, position_query, positions]
    consts = [key, value, valid, position_key]
    if documents is not None:
        query_documents, key_documents = documents
        xs.append(query_documents)
        consts.append(key_documents)
    consts[:2] = (ops.swapaxes(t, 1, 2) for t in consts[:2])
    xs = [pad_to(x, groups * size) for x in xs]
    xs.append(ops.arange(groups, dtype="int32")[None])
    rate = options.dropout or None
    if rate:
        consts.append(ops.cast(seed, dtype))
    single = isinstance(groups, int) and groups == 1
    step = _step(causal, config.window, documents is not None, rate, single)
    (heads,) = scan_groups(step, tuple(xs), tuple(consts), groups)
    return heads[:, :length]


def biased_queries(query, biases, scale):
    """The scaled queries for keys and for positions."""
    query = query * scale
    return tuple(
        query if bias is None else query + scale * ops.cast(bias, query.dtype)
        for bias in biases
    )


@functools.cache
def _step(causal, window, documents, rate, single):
    def step(carry, x, consts):
        query, position_query, positions, *rest, group = x
        group = group[0, 0]
        key, value, valid, position_key, *others = consts
        query, position_query = (ops.swapaxes(t, 1, 2) for t in (query, position_query))
        size, width = shape_of(query)[2], shape_of(key)[2]

        distance = positions[0][:, None] - ops.arange(width, dtype="int32")
        allowed = valid[:, None, None, :] > 0
        if causal:
            allowed = ops.logical_and(allowed, distance >= 0)
        if window is not None:
            allowed = ops.logical_and(allowed, ops.abs(distance) < window)
        if documents:
            same = rest[0][:, None, :, None] == others[0][:, None, None, :]
            allowed = ops.logical_and(allowed, same)

        if not single:
            # The rows of these queries' distances.
            last = shape_of(position_key)[0] - width - size
            first = last - size * group
            rows = first + ops.arange(size + width, dtype="int32")
            position_key = ops.take(position_key, rows, axis=0)
        products = position_query @ ops.transpose(position_key, (1, 2, 0))
        dropout = None if rate is None else (rate, group, others[-1])
        values, totals, _ = softmax_part(
            query, key, value, allowed, dropout, shifted_by_query(products, width)
        )
        return carry, (ops.swapaxes(divide(values, totals), 1, 2),)

    return step


@dataclasses.dataclass(frozen=True)
class RelativeConfig:
    """The positions of queries among keys, and their window; checks its values.

    Args:
        offset: Position of the first query, where the first key has position 0.
            Defaults to 0.
        window: Positive integer: only distances below it are visible. Defaults to
            `None`: all distances.

    Raises:
        ValueError: If an argument is not an integer in its range.
    """

    offset: int = 0
    window: int | None = None

    def __post_init__(self):
        as_python_numbers(self, "offset", "window")
        check_int("offset", self.offset, 0)
        check_positive_int("window", self.window, optional=True)


@jit_on_jax("config", "options")
def attend_last(inputs, position_key, biases, documents, seed, config, options):
    """The output of one query that follows all keys except its own.

    Args:
        inputs: `(query, key, value, key_mask)`; the query is `(batch, 1, heads, dim)`,
            and the keys, `(batch, offset + 1, heads, dim)`, are the state's (the
            memory) and its own.
        position_key: `(offset + 1, heads, dim)`, of distances that decrease to 0.
        biases, documents, seed, config, options: As for `attend_in_tiles`.

    Returns:
        `(batch, 1, heads, value_dim)`.
    """
    query, key, value, valid = masked_inputs(*inputs)
    content, position = biased_queries(query, biases, options.scale)
    allowed = (valid > 0)[:, None, None]
    if config.window is not None and config.window <= config.offset:
        distance = ops.arange(config.offset, -1, -1, dtype="int32")
        allowed = ops.logical_and(allowed, distance < config.window)
    if documents is not None:
        same = documents[0] == documents[1]
        allowed = ops.logical_and(allowed, same[:, None, None])
    # In the order of the keys, with decreasing distances.
    position_key = ops.cast(position_key, query.dtype)
    logits = ops.einsum("bqhd,khd->bhqk", position, position_key)
    return attend_single(
        content, key, value, allowed, options.dropout_and_seed(seed), logits
    )
