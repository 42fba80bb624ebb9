"""Softmax under a soft mask over distances, on a band of the matrix."""

import dataclasses
import functools

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import (
    attend_groups,
    merge_blocks,
    softmax_part,
)
from keras_efficient_attn.ops.common.checks import (
    as_python_numbers,
    check_bool,
    check_positive_int,
    check_positive_number,
)
from keras_efficient_attn.ops.common.chunking import (
    by_head,
    chunk_count,
    chunk_layout,
    overlapping_blocks,
    pad_length,
)
from keras_efficient_attn.ops.common.inputs import (
    hide_masked,
    masked_inputs,
    pad_to_common_length,
)
from keras_efficient_attn.ops.common.online_softmax import finish
from keras_efficient_attn.ops.common.plan import (
    block_sizes,
    has_tpu_kernels,
    jit_on_jax,
)
from keras_efficient_attn.ops.common.positions import shifted_to_keys
from keras_efficient_attn.ops.common.single_query import attend_single
from keras_efficient_attn.ops.common.state import (
    append_segment,
    drop_oldest,
    fit_recent,
)


def soft_mask(spans, distance, config):
    """`min(max((ramp + span - distance) / ramp, 0), 1)`, with a new last axis.

    Args:
        spans: `(..., queries)`, in positions.
        distance: Integers `(queries, keys)`, not negative.
        config: `SpanConfig`. Without `include_self`, the mask of distance 0 is 0.
    """
    ramp = config.ramp
    mask = (ramp + spans[..., None] - ops.cast(distance, spans.dtype)) / ramp
    # Not `clip`, whose gradient at its limits depends on the backend.
    mask = ops.where(mask < 1.0, mask, 1.0)
    least = 0 if config.include_self else 1
    return ops.where(ops.logical_and(mask > 0.0, distance >= least), mask, 0.0)


@jit_on_jax("config", "options")
def attend_in_bands(inputs, spans, position_key, state, seed, rows, config, options):
    """`(output, new state or None)` of a sequence, or of a segment with a state.

    Args:
        spans: `(heads,)`, or `(batch, query_length, heads)`.
        position_key: `(window, dim)` by distance, or `None`.
        config: `SpanConfig`.
        inputs, state, seed, rows, options: As for the forms of `SoftmaxCall.attend`.
    """
    given = state, position_key, rows.documents
    is_plain = all(x is None for x in given) and not options.dropout
    if is_plain and config.kernels and has_tpu_kernels():
        # Not imported elsewhere: Pallas is JAX's.
        from keras_efficient_attn.ops.adaptive_span import pallas

        query, key, value, key_mask = inputs
        key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
        output = pallas.attend(query, key, value, key_mask, spans, config, options)
        if output is not None:
            return output, None
    query, key, value, valid = masked_inputs(*inputs)
    length, new_state = shape_of(query)[1], None
    query = query * options.scale
    if state is None:
        query, key, value, valid = pad_to_common_length(query, key, value, valid)
        longest = query.shape[1]
        if isinstance(longest, int):
            # No query has more keys on one side.
            window = max(1, min(config.window, longest))
            config = dataclasses.replace(config, window=window)
        past = [pad_length(t, config.window - 1, 0) for t in (key, value, valid)]
    else:
        past = append_segment(fit_recent(state, config.window - 1), key, value, valid)
        new_state = drop_oldest(past, length, state["position"], rows.lengths)
    if position_key is not None:
        position_key = ops.cast(position_key[: config.window], query.dtype)
    spans = ops.cast(spans, query.dtype)
    part = _attend_band(
        (query, *past),
        spans,
        position_key,
        options.dropout_and_seed(seed),
        config,
        options.causal,
        rows.documents,
    )
    return finish(*(t[:, :length] for t in part), True), new_state


def _attend_band(inputs, spans, position_key, dropout, config, causal, documents):
    """`(values, totals, log_scale)` of each query over the keys in its band.

    Args:
        inputs: The query `(batch, length, heads, dim)`, scaled; keys and values
            `(batch, window - 1 + length, heads, dim)`, at the positions and at the
            `window - 1` before them, values zero where not valid; and `valid` `(batch,
            window - 1 + length)`, 1 for keys that exist.
        spans: `(heads,)`, or `(batch, length, heads)`.
        position_key: `(window, dim)` by distance, or `None`.
        dropout: `(rate, seed)` or `None`.
        config: `SpanConfig`.
        causal: Whether queries see no later keys.
        documents: `Documents` or `None`.
    """
    query, key, value, valid = inputs
    window = config.window
    batch, _, heads, dim = query.shape
    length = shape_of(query)[1]
    # Blocks shorter than the window waste fewer products but copy more keys.
    size = max(block_sizes().block, window // 4)
    if isinstance(length, int):
        size = max(1, min(size, length))
    blocks = chunk_count(length, size)
    width = (window - 1) * (1 if causal else 2) + size
    if len(spans.shape) == 1:
        spans = ops.broadcast_to(spans, (1, blocks, 1, heads))
    else:
        spans = overlapping_blocks(spans, size, blocks, size)
    arrays = [overlapping_blocks(query, size, blocks, size)]
    arrays += (overlapping_blocks(t, size, blocks, width) for t in (key, value, valid))
    arrays.append(spans)
    if documents is not None:
        number = documents.number
        arrays.append(overlapping_blocks(number, size, blocks, size))
        number = pad_length(number, window - 1, 0)
        arrays.append(overlapping_blocks(number, size, blocks, width))
    value_dim = value.shape[-1] or dim
    floats = heads * (3 * size * width + (size + 2 * width) * (dim + value_dim))
    unit = max(1, block_sizes().block // size)
    layout = chunk_layout(blocks, unit, batch, floats)
    consts = []
    if position_key is not None:
        # From the first key in the band of a query to the last.
        by_key = ops.flip(position_key, axis=0)
        if not causal:
            by_key = ops.concatenate([by_key, position_key[1:]], axis=0)
        consts.append(by_key)
    given = position_key is not None, documents is not None
    make_step = functools.partial(_band_step, config, causal, *given)
    part = attend_groups(make_step, arrays, consts, layout, dropout)
    return tuple(merge_blocks(t[:, :blocks])[:, :length] for t in part)


@functools.cache
def _band_step(config, causal, relative, by_document, rate):
    window = config.window

    def step(carry, x, consts):
        query, key, value, valid, spans, *rest = x
        query, key, value, spans = (by_head(t) for t in (query, key, value, spans))
        size, width = query.shape[3], key.shape[3]
        position_logits = None
        if relative:
            by_distance = query @ ops.transpose(consts[0])
            position_logits = shifted_to_keys(by_distance, width)
        distance = ops.arange(size, dtype="int32")[:, None] + (window - 1)
        distance = distance - ops.arange(width, dtype="int32")
        near = ops.logical_and(
            distance < window, distance >= (0 if causal else 1 - window)
        )
        mask = soft_mask(spans, ops.abs(distance), config)
        exists = ops.logical_and(near, valid[:, None, :, None, :] > 0)
        exists = ops.logical_and(exists, mask > 0)
        if by_document:
            same = rest[0][:, None, :, :, None] == rest[1][:, None, :, None, :]
            exists = ops.logical_and(exists, same)
        dropout = None if rate is None else (rate, rest[-1][0, 0], consts[-1])
        part = softmax_part(
            query, key, value, exists, dropout, position_logits, factors=mask
        )
        # (batch, blocks, size, heads, ...)
        return carry, tuple(
            ops.transpose(t, (0, 2, 3, 1, 4)[: len(t.shape)]) for t in part
        )

    return step


@jit_on_jax("config", "options")
def attend_next(inputs, spans, position_key, state, seed, rows, config, options):
    """Computes `attend_in_bands` for one position and a state."""
    query, *segment = masked_inputs(*inputs)
    query = query * options.scale
    past = append_segment(fit_recent(state, config.window - 1), *segment)
    key, value, valid = past
    # (batch or 1, heads, 1)
    spans = ops.cast(spans, query.dtype)
    spans = spans[None, :, None] if len(spans.shape) == 1 else ops.swapaxes(spans, 1, 2)
    distance = ops.arange(config.window - 1, -1, -1, dtype="int32")
    mask = soft_mask(spans, distance[None], config)
    allowed = ops.logical_and(valid[:, None, None] > 0, mask > 0)
    logits = ops.log(ops.where(mask > 0, mask, 1.0))
    if position_key is not None:
        by_key = ops.flip(ops.cast(position_key, query.dtype), axis=0)
        logits = logits + ops.einsum("bqhd,kd->bhqk", query, by_key)
    output = attend_single(
        query, key, value, allowed, options.dropout_and_seed(seed), logits
    )
    return output, drop_oldest(past, 1, state["position"], rows.lengths)


RAMP = 32


@dataclasses.dataclass(frozen=True)
class SpanConfig:
    """The window, and the ramp at the end of a span; checks its values.

    Args:
        window: Positive integer: a query sees itself and at most `window - 1` earlier
            keys and, if not causal, as many later ones.
        ramp: Positive number: positions over which the soft mask falls from 1 to 0.
            Defaults to 32.
        include_self: Whether a query sees the key of its own position. Defaults to
            `True`.
        kernels: Whether the device's kernels may compute. Defaults to `True`.

    Raises:
        ValueError: If a number is not positive, or `include_self` no boolean.
    """

    window: int
    ramp: float = RAMP
    include_self: bool = True
    kernels: bool = True

    def __post_init__(self):
        as_python_numbers(self, "window", "ramp")
        check_positive_int("window", self.window)
        check_positive_number("ramp", self.ramp)
        check_bool("include_self", self.include_self)
