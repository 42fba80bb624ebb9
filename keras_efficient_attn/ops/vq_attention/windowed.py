"""Exact attention to the keys of a window, and attention to the codes of the others.

A key is assigned to the codes when it leaves the window, so keys delayed by the
window's length are attended to causally. If queries also see later keys, the same runs
once more from the end. Without a window, codes stand for all keys.
"""

import math

from keras import ops

from keras_efficient_attn.ops.common.backend import BACKEND, shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_recent, fused_module
from keras_efficient_attn.ops.common.chunking import (
    fit_length,
    longer_length,
    pad_length,
    pad_to,
)
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.interval_softmax.choice import attend_window
from keras_efficient_attn.ops.common.masks import SlidingWindow
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import divide, merge
from keras_efficient_attn.ops.common.plan import (
    block_sizes,
    has_tpu_kernels,
    jit_on_jax,
)
from keras_efficient_attn.ops.common.rows import WHOLE_ROWS
from keras_efficient_attn.ops.common.scan import recompute_scan
from keras_efficient_attn.ops.common.state import keep_last
from keras_efficient_attn.ops.vq_attention import blocks, expanded, feature_kernel
from keras_efficient_attn.ops.vq_attention.by_document import attend_by_document
from keras_efficient_attn.ops.vq_attention.codebook import look_up, quantize
from keras_efficient_attn.ops.vq_attention.config import (
    Codebook,
    Keys,
    Positions,
    cache_of,
    cache_shapes,
    leaving_keys,
    map_tensors,
    named_cache,
    named_window,
    with_history,
    with_valid,
)
from keras_efficient_attn.ops.vq_attention.recurrent import attend_token

if BACKEND == "torch":
    from keras_efficient_attn.ops.vq_attention import blocks_torch


@jit_on_jax("config", "causal")
def attend_to_keys_and_codes(
    query, keys, codebook, config, causal, positions=None, state=None, rows=WHOLE_ROWS
):
    """`vq_attention` for layers, without checks and with known codes of the keys.

    Args:
        query: `(batch, query_length, heads, dim)`.
        keys: `Keys`.
        codebook: `Codebook`.
        config: `VQConfig`.
        causal: Whether query `t` sees keys `0..t` only.
        positions: Optional `Positions`.
        state: Optional state of earlier segments.
        rows: `Rows`.

    Returns:
        `(output, state)`: the output in the accumulator's dtype, and the new state or
        `None`.
    """
    takes_kernels = config.kernels and config.block_length is None
    kernel_dtype = keys.value.dtype if takes_kernels else None
    key, value, valid, index = keys
    dtype = accumulator_dtype(query, key, value)
    if valid is not None:
        key, value = hide_masked(key, valid), hide_masked(value, valid)
        valid = ops.cast(valid, dtype)
    query, key, value = (ops.cast(t, dtype) for t in (query, key, value))
    keys = Keys(key, value, valid, index)
    if config.soft:
        codebook = map_tensors(lambda t: ops.cast(t, dtype), codebook)
    else:
        codebook = Codebook(ops.stop_gradient(ops.cast(codebook.codes, dtype)))
    if positions is not None:
        positions = map_tensors(lambda t: ops.cast(t, dtype), positions)

    lengths, documents = rows
    if state is None and config.window is not None:
        options = config, causal, positions, kernel_dtype, documents
        return attend_sequence(query, keys, codebook, *options), None
    keys = with_valid(keys)
    if state is not None and query.shape[1] == key.shape[1] == 1:
        return attend_token(query, keys, codebook, config, positions, state, lengths)
    if state is not None and config.window is not None:
        return attend_segment(query, keys, codebook, config, positions, state, lengths)
    # Without a window, codes stand for all keys.
    keys, cache = keys_for_codes(keys, codebook, config), None
    if documents is not None:
        part = attend_by_document(query, keys, codebook, config, causal, documents)
        return divide(*part[:2]), None
    if causal:
        keys = map_tensors(lambda t: fit_length(t, shape_of(query)[1]), keys)
        cache = None if state is None else cache_of(state, config, dtype)
    (values, totals, _), cache = attend_to_codes(
        query, keys, codebook, config, causal, cache, kernel_dtype
    )
    return divide(values, totals), None if state is None else named_cache(cache)


def attend_sequence(
    query,
    keys,
    codebook,
    config,
    causal,
    positions,
    kernel_dtype=None,
    documents=None,
):
    """The output of a whole sequence.

    Args:
        query, keys, codebook, config, causal, positions: As for
            `attend_to_keys_and_codes`; `keys.valid` may be `None`.
        kernel_dtype: In which a kernel multiplies; `None` for no kernel.
        documents: `Documents`, or `None` for one in each row.
    """
    length = total = shape_of(query)[1]
    if query.shape[1] is None or query.shape[1] != keys.key.shape[1]:
        query, keys, positions = _fit_lengths(query, keys, causal, positions)
        total = shape_of(query)[1]
    window = config.window
    if isinstance(total, int) and total < window:
        if positions is not None:
            positions = _nearest_positions(positions, window - total, causal)
        window = max(1, total)
    near = quantize(keys, codebook) if config.quantize_window else keys
    valid, near = near.valid, (query, near.key, near.value)
    rule = SlidingWindow(window, causal)
    part = attend_window(near, valid, rule, kernel_dtype, positions, documents)
    if isinstance(total, int) and total <= window:
        # A sequence that fits in the window has no far keys.
        return divide(*part[:2])[:, :length]
    parts, far = [part], keys_for_codes(with_valid(keys), codebook, config)
    if documents is not None:
        parts.append(
            attend_by_document(query, far, codebook, config, causal, documents)
        )
        return divide(*merge(parts)[:2])
    for from_end in (False,) if causal else (False, True):
        if from_end:
            query, far = _reverse(query), map_tensors(_reverse, far)
        delayed = Keys(
            *(None if t is None else pad_length(t, window, 0)[:, :total] for t in far)
        )
        part, _ = attend_to_codes(
            query, delayed, codebook, config, kernel_dtype=kernel_dtype
        )
        parts.append(map_tensors(_reverse, part) if from_end else part)
    values, totals, _ = merge(parts)
    return divide(values, totals)[:, :length]


def attend_segment(query, keys, codebook, config, positions, state, lengths):
    """A segment of a causal sequence; arguments as for `attend_sequence`.

    Args:
        state: The state before the segment.
        lengths: As for `attend_to_keys_and_codes`.

    Returns:
        `(output, state)`.
    """
    if query.shape[1] is None or query.shape[1] != keys.key.shape[1]:
        query, keys, positions = _fit_lengths(query, keys, True, positions)
    length = shape_of(query)[1]
    near = quantize(keys, codebook) if config.quantize_window else keys
    history = with_history(state, near)
    rule = SlidingWindow(config.window, True)
    recent = (t[:, 1:] for t in history[:3])
    part = attend_recent(query, *recent, rule, None, relative=positions)
    leaving = leaving_keys(history, length, lengths)
    far, cache = attend_to_codes(
        query,
        keys_for_codes(leaving, codebook, config),
        codebook,
        config,
        cache=cache_of(state, config, query.dtype),
    )
    values, totals, _ = merge([part, far])
    recent = map_tensors(lambda t: keep_last(t, length, lengths), history)
    return divide(values, totals), {**named_window(recent), **named_cache(cache)}


def attend_to_codes(
    query, keys, codebook, config, causal=True, cache=None, kernel_dtype=None
):
    """Partial softmax over the keys' codes, and the cache after the last key.

    Args:
        query: `(batch, query_length, heads, dim)`.
        keys: `Keys` from `keys_for_codes`.
        codebook: `Codebook`.
        config: `VQConfig`.
        causal: Whether query `t` sees keys `0..t` only.
        cache: The cache of earlier keys, or `None` for none.
        kernel_dtype: In which a kernel multiplies; `None` for no kernel.

    Returns:
        `(part, cache)`, for `online_softmax.merge`; the cache is `None` if none was
        given and none was needed.
    """
    codes, expands, kernel = codebook.codes, config.order == 2, None
    may_use_kernel = cache is None and causal and not expands and kernel_dtype
    if may_use_kernel and has_tpu_kernels():
        kernel = feature_kernel.kernel_for(query, keys, codes, kernel_dtype)
    in_a_block = cache is None and expands and _fit_in_a_block(query, keys.key, config)
    if cache is None and kernel is None and not in_a_block:
        sizes = shape_of(query)[0], *codes.shape, shape_of(keys.value)[-1]
        shapes = cache_shapes(*sizes, config)
        cache = tuple(ops.zeros(shape, query.dtype) for shape in shapes)
    if not config.gradient_through_cache:
        keys, codebook, cache = (
            map_tensors(ops.stop_gradient, t) for t in (keys, codebook, cache or ())
        )
    if kernel is not None:
        tensors = query, keys, codes
        return feature_kernel.causal_attention(kernel, *tensors, kernel_dtype), None
    if in_a_block:
        part = expanded.attention_in_a_block(query, keys, codebook, config, causal)
        return part, None
    if causal and not (expands or config.soft) and fused_module(query) is not None:
        attend = blocks_torch.causal_code_attention
    else:
        attend = causal_code_attention if causal else full_code_attention
    return attend(query, keys, codebook, cache, config)


def causal_code_attention(query, keys, codebook, cache, config):
    """Partial softmax of query `t` over the keys `0..t`, through their codes.

    Args:
        query: `(batch, length, heads, dim)`.
        keys: `Keys` from `keys_for_codes`; values of missing keys are zero.
        codebook: `Codebook`.
        cache: `(sum, count)` of shapes `(batch, heads, codes, value_dim)` and `(batch,
            heads, codes)`; with `order=2`, what `expanded` describes.
        config: `VQConfig`.

    Returns:
        `(part, cache)`: values, totals and log scales for `online_softmax.merge`, and
        the cache after the last position.
    """
    codes, gradient = codebook.codes, None
    sequential = block_sizes().sequential_blocks
    size, number, groups = blocks.layout(query, keys.value, codes, config, sequential)
    xs = (query, *blocks.key_columns(keys))
    xs = tuple(pad_to(x, groups * number * size) for x in xs)
    if config.order == 2:
        step = expanded.causal_step(size, config.expanded_dims(codes.shape[-1]))
    elif config.soft:
        step = blocks.soft_step(size)
    else:
        step, gradient = blocks.hard_step(size)
    consts = tuple(t for t in codebook if t is not None)
    cache, part = recompute_scan(step, cache, xs, consts, gradient, num_steps=groups)
    return tuple(y[:, : shape_of(query)[1]] for y in part), cache


def full_code_attention(query, keys, codebook, cache, config):
    """`causal_code_attention` without causality: queries see every valid key.

    Queries and keys may differ in length.
    """
    codes, rank = codebook.codes, config.expanded_dims(codebook.codes.shape[-1])
    expands = config.order == 2
    key_step = expanded.key_step(rank) if expands else blocks.key_step
    query_step = expanded.query_step(rank) if expands else blocks.query_step

    def padded(sequence, *tensors):
        sizes = blocks.layout(sequence, keys.value, codes, config, expands)
        return tuple(pad_to(x, math.prod(sizes)) for x in tensors), sizes[2]

    xs, groups = padded(keys.value, *blocks.key_columns(keys))
    consts = tuple(t for t in codebook if t is not None)
    cache, _ = recompute_scan(key_step, cache, xs, consts, num_steps=groups)
    xs, groups = padded(query, query)
    _, part = recompute_scan(query_step, (), xs, (codes, *cache), num_steps=groups)
    return tuple(y[:, : shape_of(query)[1]] for y in part), cache


def keys_for_codes(keys, codebook, config):
    """The representation of keys beyond the window.

    The keys themselves for soft codes, their residuals with `order=2`; otherwise the
    `index` of their code says all.
    """
    if config.soft:
        return keys
    if config.order == 0:
        return keys._replace(key=None)
    return keys._replace(key=keys.key - look_up(codebook.codes, keys.index))


def _fit_in_a_block(query, key, config):
    """Whether queries and keys are known to fit in one block."""
    lengths = query.shape[1], key.shape[1]
    return all(isinstance(n, int) and 0 < n <= config.longest_in_pairs for n in lengths)


def _fit_lengths(query, keys, causal, positions):
    """Pads or cuts all to one length; drops only queries without keys in reach."""
    keys = with_valid(keys)
    total = shape_of(query)[1]
    if not causal:
        # Queries after the last key still see the keys in their window.
        total = longer_length(total, shape_of(keys.key)[1])

    def fit(x):
        return fit_length(x, total)

    if positions is not None:
        positions = positions._replace(query=fit(positions.query))
    return fit(query), map_tensors(fit, keys), positions


def _nearest_positions(positions, number, causal):
    """Drops the keys of the `number` farthest distances on either side."""
    last = positions.key.shape[0] - (0 if causal else number)
    return Positions(positions.query, positions.key[number:last])


def _reverse(x):
    return ops.flip(x, axis=1)
