"""Attention to near keys, and to the codes of far ones, over several devices."""

from keras import ops

from keras_efficient_attn.distribution.linear import received_window
from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.state import make_state
from keras_efficient_attn.ops.local_attention import local_attention as attend_locally
from keras_efficient_attn.ops.vq_attention.config import (
    CACHE_NAMES,
    WINDOW_NAMES,
    Positions,
    map_tensors,
    state_spec,
)
from keras_efficient_attn.ops.vq_attention.windowed import attend_to_keys_and_codes


def local_attention(devices, split, whole, window, causal, scale):
    """Computes `ops.local_attention` with a window on one device's positions.

    Args:
        devices: `Devices`.
        split: `(query, key, value, key_mask)`; the mask may be `None`.
        whole: Unused.
        window, causal, scale: As for `ops.local_attention`.
    """
    query, key, value, key_mask = split
    if key_mask is None:
        key_mask = ops.ones(shape_of(key)[:2], "bool")
    length, reach = query.shape[1], window - 1
    keys = [key, value, ops.cast(key_mask, "int32")]
    if reach:
        before = [devices.from_previous(t[:, -reach:]) for t in keys]
        parts = [before, keys]
        if not causal:
            parts.append([devices.from_next(t[:, :reach]) for t in keys])
        keys = [ops.concatenate(p, axis=1) for p in zip(*parts, strict=True)]
        # Queries at other devices' positions; those devices compute the outputs.
        behind = 0 if causal else reach
        pads = ((0, 0), (reach, behind), (0, 0), (0, 0))
        query = ops.pad(query, pads)
    key, value, key_mask = keys
    output = attend_locally(
        query,
        key,
        value,
        window=window,
        causal=causal,
        key_mask=ops.cast(key_mask, "bool"),
        scale=scale,
    )
    return output[:, reach : reach + length]


def vq_attention(devices, split, whole, config):
    """Computes causal `attend_to_keys_and_codes` on one device's positions.

    Args:
        devices: `Devices`.
        split: `(query, keys, position_query)`; `keys` is a `Keys`, and the last may be
            `None`.
        whole: `(codebook, position_key)`.
        config: `VQConfig`.
    """
    query, keys, position_query = split
    codebook, position_key = whole
    sizes = (shape_of(query)[0], *codebook.codes.shape, shape_of(keys.value)[-1])
    dtype = accumulator_dtype(query, keys.key, keys.value)
    state = make_state(state_spec(*sizes, config, dtype))

    def attend(state, start=0):
        positions = None
        if position_query is not None:
            positions = Positions(position_query[:, start:], position_key)
        own = map_tensors(lambda t: t[:, start:], keys)
        return attend_to_keys_and_codes(
            query[:, start:], own, codebook, config, True, positions, state
        )

    if config.window is not None:
        names = [name for name in WINDOW_NAMES if name in state]
        state = received_window(devices, attend, state, names, config.window)
    _, own = attend(state)
    before, sums = devices.before(query), {}
    for name in CACHE_NAMES:
        if name in state:
            parts = devices.all_gather(own[name])
            seen = ops.reshape(before, (-1,) + (1,) * (len(parts.shape) - 1))
            sums[name] = ops.sum(parts * ops.cast(seen, parts.dtype), axis=0)
    output, _ = attend({**state, **sums})
    return output
