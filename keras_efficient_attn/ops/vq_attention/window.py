"""Exact attention to the keys of a window, and attention to the codes of the others.

A key is assigned to the codes when it leaves the window, so keys delayed by the
window's length are attended to causally. If queries also see later keys, the same runs
once more from the end.
"""

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_recent
from keras_efficient_attn.ops.common.chunking import (
    fit_length,
    longer_length,
    pad_length,
)
from keras_efficient_attn.ops.common.interval_softmax.choice import attend_window
from keras_efficient_attn.ops.common.masks import SlidingWindow
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.common.state import append_segment
from keras_efficient_attn.ops.vq_attention.cache import (
    WINDOW_NAMES,
    cache_of,
    named_cache,
)
from keras_efficient_attn.ops.vq_attention.codebook import look_up, straight_through
from keras_efficient_attn.ops.vq_attention.far import attend_far, far_keys
from keras_efficient_attn.ops.vq_attention.tensors import (
    Keys,
    Positions,
    each,
    with_valid,
)


def near_keys(keys, codebook, config):
    """The keys seen in the window; their codes if the window is quantised."""
    if not config.quantize_window:
        return keys
    codes = look_up(codebook.codes, keys.index)
    return keys._replace(key=straight_through(keys.key, codes))


def attend_sequence(
    query, keys, codebook, config, causal, positions, kernel_dtype=None
):
    """The output of a whole sequence.

    Args:
        query, keys, codebook, config, causal, positions: As for
            `attend_to_keys_and_codes`; `keys.valid` may be `None`.
        kernel_dtype: In which a kernel multiplies; `None` for no kernel.
    """
    length = shape_of(query)[1]
    query, keys, positions = _fit_lengths(query, keys, causal, positions)
    exist, keys = keys.valid, with_valid(keys)
    total, window = shape_of(query)[1], config.window
    if isinstance(total, int) and total < window:
        positions = _nearest_positions(positions, window - total, causal)
        window = max(1, total)
    near, rule = near_keys(keys, codebook, config), SlidingWindow(window, causal)
    near = query, near.key, near.value, exist
    parts = [attend_window(*near, rule, kernel_dtype, relative=positions)]
    # A sequence that fits in the window has no far keys.
    if not (isinstance(total, int) and total <= window):
        far = far_keys(keys, codebook, config)
        delayed = _delay(far, window, total)
        rest = codebook, config, True, None, kernel_dtype
        parts.append(attend_far(query, delayed, *rest)[0])
        if not causal:
            query, far = _reverse(query), each(_reverse, far)
            delayed = _delay(far, window, total)
            after, _ = attend_far(query, delayed, *rest)
            parts.append(each(_reverse, after))
    return finish(*merge(parts), normalize=True)[:, :length]


def attend_segment(query, keys, codebook, config, positions, state):
    """A segment of a causal sequence; arguments as for `attend_sequence`.

    Args:
        state: The state before the segment.

    Returns:
        `(output, state)`.
    """
    query, keys, positions = _fit_lengths(query, with_valid(keys), True, positions)
    length = shape_of(query)[1]
    near = near_keys(keys, codebook, config)
    history = with_history(state, near)
    rule = SlidingWindow(config.window, True)
    recent = (t[:, 1:] for t in history[:3])
    # The mask depends on distances only, so any start works.
    part = attend_recent(query, *recent, rule, start=0, relative=positions)
    leaving = each(lambda t: t[:, :length], history)
    far, cache = attend_far(
        query,
        far_keys(leaving, codebook, config),
        codebook,
        config,
        cache=cache_of(state, config, query.dtype),
    )
    output = finish(*merge([part, far]), normalize=True)
    recent = each(lambda t: t[:, length:], history)
    return output, {**named_window(recent), **named_cache(cache)}


def with_history(state, near):
    """The keys of a state's window, followed by a segment's keys."""
    # Soft codes have no `index`, the last of the four.
    given = [t for t in near if t is not None]
    return Keys(*append_segment(state, *given, names=WINDOW_NAMES[: len(given)]))


def named_window(recent):
    """The keys of a window as a dict of state tensors."""
    pairs = zip(WINDOW_NAMES, recent, strict=True)
    return {name: t for name, t in pairs if t is not None}


def _fit_lengths(query, keys, causal, positions):
    """Pads or cuts all to one length; drops only queries without keys in reach."""
    lengths = query.shape[1], keys.key.shape[1]
    if None not in lengths and lengths[0] == lengths[1]:
        return query, keys, positions
    keys = with_valid(keys)
    total = shape_of(query)[1]
    if not causal:
        # Queries after the last key still see the keys in their window.
        total = longer_length(total, shape_of(keys.key)[1])

    def fit(x):
        return fit_length(x, total)

    if positions is not None:
        positions = positions._replace(query=fit(positions.query))
    return fit(query), each(fit, keys), positions


def _delay(keys, window, total):
    return each(lambda t: pad_length(t, window, 0)[:, :total], keys)


def _reverse(x):
    return ops.flip(x, axis=1)


def _nearest_positions(positions, number, causal):
    """Drops the keys of the `number` farthest distances on either side."""
    if positions is None:
        return None
    last = positions.key.shape[0] - (0 if causal else number)
    return Positions(positions.query, positions.key[number:last])
