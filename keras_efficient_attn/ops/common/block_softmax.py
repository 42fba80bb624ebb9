"""Softmax attention from blocks of queries to blocks of keys, a few blocks at a time.

A mask function defines the keys that a query sees: see `ops.common.masks`.
"""

import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import (
    BACKEND,
    in_function_transform,
    shape_of,
)
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    by_position,
    chunk_count,
    chunk_layout,
    columns,
    overlapping_blocks,
    pad_length,
    pad_to,
    sizes,
)
from keras_efficient_attn.ops.common.numerics import max_along, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, merge
from keras_efficient_attn.ops.common.plan import block_sizes
from keras_efficient_attn.ops.common.positions import shifted_to_keys
from keras_efficient_attn.ops.common.random import drop
from keras_efficient_attn.ops.common.scan import recompute_scan

if BACKEND == "torch":
    import torch

    from keras_efficient_attn.ops.common import fused_softmax_torch as _fused
    from keras_efficient_attn.ops.common import private_torch


def attend_blocks(
    query,
    key,
    value,
    valid,
    mask_fn,
    positions,
    dropout=None,
    relative=None,
):
    """Partial softmax over each block's keys.

    Args:
        query: `(batch, blocks, size, heads, dim)`, scaled.
        key: `(batch, blocks, width, heads, dim)`.
        value: `(batch, blocks, width, heads, value_dim)`, zero where not valid.
        valid: `(batch, blocks, width)`, 1 for keys that exist and 0 for others.
        mask_fn: Mask function: the keys that a query sees.
        positions: Positions of queries and keys, for `mask_fn`: `(size,)` and
            `(width,)`, equal in all blocks, or `(batch, blocks, size)` and `(batch,
            blocks, width)`; these may be followed by numbers of documents of the same
            shapes: a query sees the keys of its own.
        dropout: `(rate, seed)` or `None`.
        relative: `(position_query, position_key)` or `None`: queries of the shape of
            `query`, and keys `(distances, heads, dim)`; their products are added to
            the logits, from the block's query `i` and the distance `m` to that of key
            `i + m`.

    Returns:
        `(values, totals, log_scale)` for `online_softmax.merge`, each of
        `(batch, blocks, size, heads, ...)`.
    """
    fused = fused_module(query, dropout, relative)
    if fused is not None:
        return fused.attend_blocks(query, key, value, valid, mask_fn, positions)
    batch, blocks, size, heads, dim = query.shape
    blocks = shape_of(query)[1]
    width, value_dim = key.shape[2], value.shape[-1] or dim
    if isinstance(size, int) and isinstance(width, int):
        floats = heads * (2 * size * width + (size + 2 * width) * (dim + value_dim))
        unit = max(1, block_sizes().block // size)
    else:
        # The size is unknown: one block at a time.
        floats, unit = block_sizes().step_floats, 1
    layout = chunk_layout(blocks, unit, batch, floats)
    arrays, consts = [query, key, value, valid], []
    if relative is not None:
        position_query, position_key = relative
        arrays.append(position_query)
        consts.append(position_key)
    shared = len(positions[0].shape) == 1
    if not shared:
        arrays += positions
    consts += positions if shared else []
    kind = shared, len(positions) == 4, relative is not None
    make_step = functools.partial(_block_step, mask_fn, *kind)
    part = attend_groups(make_step, arrays, consts, layout, dropout)
    return tuple(t[:, :blocks] for t in part)


def attend_groups(make_step, arrays, consts, layout, dropout):
    """The outputs of the steps of attention with dropout on the weights.

    Args:
        make_step: Cached `rate -> step`, for the rate of the dropout or `None`. With
            dropout, a step has the number of the group as its last `x`, and the seed as
            its last constant.
        arrays: `(batch, length, ...)`, the query first; padded to whole steps.
        consts: What all steps read.
        layout: From `chunk_layout`.
        dropout: `(rate, seed)` or `None`.
    """
    size, chunks, groups = layout
    xs = [pad_to(x, groups * size * chunks) for x in arrays]
    rate, dtype = None, arrays[0].dtype
    if dropout is not None:
        rate, seed = dropout
        xs.append(ops.arange(groups, dtype="int32")[None])
        consts = *consts, ops.cast(seed, dtype)
    return scan_groups(make_step(rate), tuple(xs), tuple(consts), groups)


def scan_groups(step, xs, consts, groups):
    """The steps' outputs; a single step runs without a loop or recomputation."""
    if isinstance(groups, int) and groups == 1:
        return step((), xs, consts)[1]
    return recompute_scan(step, (), xs, consts, num_steps=groups)[1]


@functools.cache
def _block_step(mask_fn, shared, by_document, relative, rate):
    def step(carry, x, consts):
        query, key, value, valid, *rest = x
        query, key, value = (by_head(t) for t in (query, key, value))
        position_logits = None
        if relative:
            position_query, *rest = rest
            position_key, *consts = consts
            position_logits = _products_by_key(
                by_head(position_query), position_key, shape_of(key)[3]
            )
        positions = consts[:2] if shared else rest[: 4 if by_document else 2]
        # (1, 1, 1 or blocks, size, width)
        allowed = see(mask_fn, positions)
        allowed = allowed[None, None, None] if shared else allowed[:, None]
        allowed = ops.logical_and(allowed, valid[:, None, :, None, :] > 0)
        dropout = None if rate is None else (rate, rest[-1][0, 0], consts[-1])
        part = softmax_part(query, key, value, allowed, dropout, position_logits)
        return carry, tuple(
            ops.transpose(t, _BLOCKS_FIRST[: len(t.shape)]) for t in part
        )

    return step


def see(mask_fn, positions):
    """The keys that queries see, as booleans `(..., queries, keys)`.

    Args:
        mask_fn: Mask function.
        positions: Positions `(..., queries)` and `(..., keys)`, and optionally the
            numbers of documents of both.
    """
    i, j, *numbers = positions
    allowed = mask_fn(i[..., :, None], j[..., None, :])
    if numbers:
        same = numbers[0][..., :, None] == numbers[1][..., None, :]
        allowed = ops.logical_and(allowed, same)
    return allowed


# From (batch, heads, blocks, size, dim).
_BLOCKS_FIRST = (0, 2, 3, 1, 4)


def _products_by_key(position_query, position_key, width):
    """`(batch, heads, blocks, size, width)`, for `attend_blocks`."""
    products = position_query @ ops.transpose(position_key, (1, 2, 0))[:, None]
    return shifted_to_keys(products, width)


def softmax_part(
    query, key, value, allowed, dropout, position_logits=None, factors=None
):
    """`(values, totals, log_scale)` of matrices of queries, keys and values.

    `factors` multiply the weights before they are normalised.
    """
    logits = query @ ops.swapaxes(key, -1, -2)
    if position_logits is not None:
        logits = logits + position_logits
    logits = where(allowed, logits, LOG_ZERO)
    scale = max_along(ops.stop_gradient(logits), axis=-1, initial=LOG_ZERO)
    weights = ops.exp(logits - scale[..., None])
    if factors is not None:
        weights = factors * weights
    weights = ops.where(allowed, weights, 0.0)
    totals = ops.sum(weights, axis=-1)
    if dropout is not None:
        weights = drop(weights, *dropout)
    return weights @ value, totals, scale


def attend_shared(query, key, value, valid, mask_fn, positions, dropout=None):
    """Partial softmax over keys that all queries share.

    Args:
        query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, keys, heads, dim)`, `value` zero where not valid.
        valid: `(batch, keys, heads)`.
        mask_fn: Mask function: the keys that a query sees.
        positions: Positions of queries, `(length,)`, or `(batch, length)` with a state,
            and of keys `(heads, keys)`; or `(batch, length)` and `(batch, 1, keys)`,
            followed by numbers of documents of the same shapes, as for `attend_blocks`.
        dropout: `(rate, seed)` or `None`.

    Returns:
        `(values, totals, log_scale)`, each of `(batch, length, heads, ...)`.
    """
    fused = fused_module(query, dropout)
    by_row = len(positions[0].shape) == 2
    if fused is not None and not by_row:
        inputs = query, key, value, valid
        return fused.attend("shared", *inputs, positions, mask_fn)
    length, heads, dim = shape_of(query)[1], query.shape[2], query.shape[3]
    keys = key.shape[1]
    plan = block_sizes()
    floats = plan.step_floats // plan.block
    if isinstance(keys, int):
        floats = heads * (2 * keys + dim + (value.shape[-1] or dim))
    layout = chunk_layout(length, plan.block, query.shape[0], floats)
    # Of queries, of keys, and likewise numbers of documents.
    by_query, by_key = positions[0::2], positions[1::2]
    arrays = query, *(x if by_row else x[None] for x in by_query)
    consts = [key, value, valid, *by_key]
    consts[:3] = (ops.swapaxes(t, 1, 2) for t in consts[:3])
    make_step = functools.partial(_shared_step, mask_fn, len(by_query))
    part = attend_groups(make_step, arrays, consts, layout, dropout)
    return tuple(t[:, :length] for t in part)


@functools.cache
def _shared_step(mask_fn, kinds, rate):
    def step(carry, x, consts):
        query, by_query = ops.swapaxes(x[0], 1, 2), x[1 : 1 + kinds]
        key, value, valid, *by_key = consts[: 3 + kinds]
        pairs = zip(by_query, by_key, strict=True)
        # By head: (batch, 1, length) and (1 or batch, heads or 1, keys).
        positions = [
            x for i, j in pairs for x in (i[:, None], j if kinds > 1 else j[None])
        ]
        allowed = see(mask_fn, positions)
        allowed = ops.logical_and(allowed, valid[:, :, None, :] > 0)
        dropout = None if rate is None else (rate, x[-1][0, 0], consts[-1])
        part = softmax_part(query, key, value, allowed, dropout)
        return carry, tuple(ops.swapaxes(t, 1, 2) for t in part)

    return step


def attend_near(
    query, key, value, valid, mask_fn, dropout=None, relative=None, documents=None
):
    """Partial softmax over the keys near each query that a mask function allows.

    Args:
        query: `(batch, length, heads, dim)`, scaled, from position 0 on.
        key, value: `(batch, length, heads, dim)`, `value` zero where not valid.
        valid: `(batch, length)`.
        mask_fn: Mask function: the keys that a query sees.
        dropout: `(rate, seed)` or `None`.
        relative: As for `attend_blocks`, with the distances that `mask_fn` allows.
        documents: `Documents`, whose positions `mask_fn` then takes. Defaults to
            `None`: one in each row.

    Returns:
        `(values, totals, log_scale)`, each of `(batch, length, heads, ...)`.
    """
    fused = fused_module(query, dropout, relative)
    if fused is not None:
        places = [] if documents is None else [documents.position, documents.number]
        return fused.attend("band", query, key, value, valid, places, mask_fn)
    before, after, period = mask_fn.before, mask_fn.after, mask_fn.period
    length = shape_of(query)[1]
    if documents is not None:
        # Documents begin anywhere in a period.
        before, after = (reach + period - 1 for reach in (before, after))
    if relative is None:
        if isinstance(length, int):
            # There are no keys farther away.
            before, after = (min(n, max(0, length - 1)) for n in (before, after))
        # Whole vectors of keys: products with 127 are slower than with 128.
        before, after = (-(-reach // 16) * 16 for reach in (before, after))
    block = max(block_sizes().block, before, after) // period * period
    block = max(period, block)
    if isinstance(length, int):
        block = min(block, chunk_count(length, period) * period)
    alone = isinstance(length, int) and length <= block
    in_reach = not after and (alone or before <= block) and documents is None
    if in_reach and dropout is None and relative is None:
        # The own block and the one before, which steps pass on.
        batch, _, heads, dim = shape_of(query)
        floats = heads * (4 * block + 3 * (dim + (value.shape[-1] or dim)))
        size, blocks, groups = chunk_layout(length, block, query.shape[0], floats)
        xs = (query, key, value, columns(valid))
        xs = tuple(pad_to(x, groups * blocks * size) for x in xs)
        shapes = (heads, dim), (heads, shape_of(value)[-1]), (1, 1)
        carry = tuple(ops.zeros((batch, h, size, d), query.dtype) for h, d in shapes)
        step = _block_recurrent_step(mask_fn, size, alone)
        part = recompute_scan(step, carry, xs, num_steps=groups)[1]
        return tuple(t[:, :length] for t in part)
    width = before + block + after
    if documents is None:
        # Congruent to the true positions and non-negative.
        base = -(-before // period) * period
        positions = (
            base + ops.arange(block, dtype="int32"),
            base - before + ops.arange(width, dtype="int32"),
        )
    else:
        count = chunk_count(length, block)
        positions = []
        for x in (documents.position, documents.number):
            positions.append(overlapping_blocks(x, block, count, block))
            x = pad_length(x, before, 0)
            positions.append(overlapping_blocks(x, block, count, width))
    past = (pad_length(t, before, 0) for t in (key, value, valid))
    return _attend_band((query, *past), mask_fn, positions, dropout, relative)


@functools.cache
def _block_recurrent_step(mask_fn, block, alone):
    """Causal attention to the own block and the one before; `alone`: to one block."""

    def step(carry, x, consts):
        query, *own = (by_head(t, block) for t in x)
        before = [
            ops.concatenate([last[:, :, None], t[:, :, :-1]], axis=2)
            for last, t in zip(carry, own, strict=True)
        ]
        # A single block need not have a whole number of the mask's periods.
        first = 0 if alone else block
        here, parts = first + ops.arange(block, dtype="int32"), []
        blocks = [(before, here - block), (own, here)]
        for (key, value, valid), there in blocks[alone:]:
            allowed = mask_fn(here[:, None], there)
            allowed = ops.logical_and(allowed, valid[..., None, :, 0] > 0)
            parts.append(softmax_part(query, key, value, allowed, None))
        carry = tuple(t[:, :, -1] for t in own)
        return carry, tuple(by_position(t) for t in merge(parts))

    return step


def attend_recent(
    query, key, value, valid, mask_fn, position, dropout=None, relative=None
):
    """Computes `attend_near` for a causal segment and the keys before it.

    Args:
        query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, reach + length, heads, dim)`: the last `mask_fn.reach` keys
            before the segment, and the segment's keys.
        valid: `(batch, reach + length)`.
        mask_fn: Mask function: the keys that a query sees.
        position: Position of the segment's first query, integers `(batch,)`; `None` for
            a mask function that reads distances only.
        dropout: `(rate, seed)` or `None`.
        relative: As for `attend_near`.
    """
    fused = fused_module(query, dropout, relative)
    if fused is not None and position is None:
        return fused.attend("recent", query, key, value, valid, [], mask_fn)
    reach, length = mask_fn.reach, shape_of(query)[1]
    block = max(block_sizes().block, reach)
    if isinstance(length, int):
        block = max(1, min(block, length))
    count = chunk_count(length, block)
    first = block * ops.arange(count, dtype="int32")[:, None]
    first = first[None] if position is None else first + position[:, None, None]
    positions = (
        first + ops.arange(block, dtype="int32"),
        first - reach + ops.arange(reach + block, dtype="int32"),
    )
    inputs = query, key, value, valid
    return _attend_band(inputs, mask_fn, positions, dropout, relative)


def _attend_band(inputs, mask_fn, positions, dropout, relative):
    """Attention in blocks, to keys that start some positions before the queries.

    The positions of queries and keys, as for `attend_blocks`, define the block sizes.
    """
    query, *keys = inputs
    length, (block, width) = shape_of(query)[1], (p.shape[-1] for p in positions[:2])
    count = chunk_count(length, block)
    query = overlapping_blocks(query, block, count, block)
    keys = (overlapping_blocks(t, block, count, width) for t in keys)
    if relative is not None:
        position_query, position_key = relative
        position_query = overlapping_blocks(position_query, block, count, block)
        relative = position_query, position_key
    part = attend_blocks(query, *keys, mask_fn, positions, dropout, relative)
    return tuple(merge_blocks(t)[:, :length] for t in part)


def merge_blocks(x):
    """`(batch, blocks, size, ...)` as `(batch, blocks · size, ...)`."""
    batch, blocks, size, *tail = sizes(x)
    return ops.reshape(x, (batch, blocks * size, *tail))


def fused_module(query, dropout=None, relative=None):
    """The module of PyTorch's kernel for CPUs, or `None` if it does not apply."""
    if BACKEND != "torch" or dropout is not None or relative is not None:
        return None
    if in_function_transform():
        return None
    # An exported program may run anywhere.
    on_cpu = query.device.type == "cpu" and not torch.compiler.is_exporting()
    kernels = private_torch.fused_attention, private_torch.fused_attention_backward
    return _fused if on_cpu and query.numel() and None not in kernels else None
