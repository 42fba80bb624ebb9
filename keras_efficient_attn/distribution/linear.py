"""Linear attention over a sequence that is split across devices.

Each device sums up its own keys; one all-gather exchanges the sums; each device starts
from the sum over the devices before it. The sums' size does not depend on the length.
"""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.numerics import accumulator_dtype, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention_state,
    linear_attention_with_feature_maps,
)
from keras_efficient_attn.ops.linear_attention.gated.api import (
    gated_attention_with_feature_maps,
)
from keras_efficient_attn.ops.linear_attention.windowed import (
    STATE_NAMES,
    windowed_linear_attention,
)


def linear_attention(devices, split, map_weights, config):
    """Computes `linear_attention_with_feature_maps`, on the positions of one device.

    Args:
        devices: `Devices`.
        split: `(query, key, value, key_mask, key_log_weight)`; the last two may be
            `None`.
        map_weights: Tuple of tensors that the feature maps read.
        config: `LinearAttentionConfig`.

    Returns:
        `(batch, length, heads, value_dim)` in the accumulator's dtype.
    """
    query, key, value, key_mask, key_log_weight = split
    options = dict(map_weights=map_weights, key_log_weight=key_log_weight)
    # Sum all keys up for a single query, whose output is discarded.
    whole = dataclasses.replace(config, causal=False, implementation="chunked")
    _, own = linear_attention_with_feature_maps(
        (query[:, :1], key, value),
        whole,
        key_mask=key_mask,
        state=_empty_state(query, value, config),
        **options,
    )
    if config.causal:
        state = _total(_gather(devices, own), devices.before(value))
        outputs, _ = linear_attention_with_feature_maps(
            (query, key, value), config, key_mask=key_mask, state=state, **options
        )
        return outputs[0]
    everywhere = ops.ones((devices.size,), "bool")
    state = _total(_gather(devices, own), everywhere)
    # One masked key: all real keys are in the state.
    none = ops.zeros(shape_of(key)[:1] + (1,), "bool")
    if key_log_weight is not None:
        options["key_log_weight"] = key_log_weight[:, :1]
    outputs, _ = linear_attention_with_feature_maps(
        (query, key[:, :1], value[:, :1]), whole, key_mask=none, state=state, **options
    )
    return outputs[0]


def windowed_attention(devices, split, whole, config):
    """Computes causal `windowed_linear_attention`; arguments as `linear_attention`.

    `whole` is the pair `(map_weights, window_bias)`.
    """
    query, key, value, key_mask, _ = split
    map_weights, window_bias = whole
    state = _empty_state(query, value, config)
    batch, _, heads, dim = shape_of(key)
    rows, dtype = (batch, config.window), accumulator_dtype(query, key, value)
    shapes = (*rows, heads, dim), (*rows, heads, shape_of(value)[-1]), rows
    for name, shape in zip(STATE_NAMES, shapes, strict=True):
        state[name] = ops.zeros(shape, dtype)

    def attend(state, start=0):
        mask = None if key_mask is None else key_mask[:, start:]
        return windowed_linear_attention(
            tuple(t[:, start:] for t in (query, key, value)),
            config,
            map_weights=map_weights,
            key_mask=mask,
            state=state,
            window_bias=window_bias,
        )

    state = received_window(devices, attend, state, STATE_NAMES, config.window)
    # A key enters the sums when it leaves the window. This device sums up the keys of
    # the window before its positions; the next device sums up this device's last keys.
    _, own = attend(state)
    own = {name: x for name, x in own.items() if name not in STATE_NAMES}
    total = _total(_gather(devices, own), devices.before(value))
    output, _ = attend({**state, **total})
    return output


def gated_attention(devices, split, map_weights, config):
    """Computes `gated_attention_with_feature_maps`, on the positions of one device.

    The positions of a device map the state before them to `T S + S_own`. `T`
    `(features, features)` is the state that they make of the identity, with values of
    zero.

    Args:
        devices: `Devices`.
        split: `(query, key, value, key_mask, rates)`.
        map_weights, config: As for `linear_attention`.

    Returns:
        `(batch, length, heads, value_dim)` in the accumulator's dtype.
    """
    query, key, value, key_mask, rates = split
    options = dict(map_weights=map_weights, key_mask=key_mask)
    state = _empty_state(query, value, config)
    state["log_scale"] = ops.zeros_like(state["log_scale"])
    features, value_dim = config.num_features, shape_of(value)[-1]
    none = ops.zeros((*shape_of(value)[:3], features), value.dtype)
    batch, heads = shape_of(state["log_scale"])
    identity = ops.eye(features, dtype=state["sum"].dtype)
    identity = ops.broadcast_to(identity, (batch, heads, features, features))
    _, own = gated_attention_with_feature_maps(
        (query, key, ops.concatenate([value, none], axis=-1)),
        rates,
        config,
        state={**state, "sum": ops.concatenate([state["sum"], identity], axis=-1)},
        **options,
    )
    sums, normalizer = own["sum"], own["normalizer"][..., None]
    parts = sums[..., :value_dim], normalizer, sums[..., value_dim:]
    parts = devices.all_gather(ops.concatenate(parts, axis=-1))
    before = devices.before(parts)
    carry = ops.zeros_like(parts[0][..., : value_dim + 1])
    for index in range(devices.size):
        own, transition = parts[index][..., :-features], parts[index][..., -features:]
        carry = ops.where(before[index], transition @ carry + own, carry)
    state["sum"], state["normalizer"] = carry[..., :value_dim], carry[..., value_dim]
    output, _ = gated_attention_with_feature_maps(
        (query, key, value), rates, config, state=state, **options
    )
    return output


def received_window(devices, attend, state, names, window):
    """A state with the last keys of the previous device.

    Args:
        devices: `Devices`.
        attend: `(state, start) -> (output, state)` of this device's positions from
            `start` on.
        state: The empty state.
        names: Names of the state's tensors that hold the last `window` keys.
        window: Number of keys.
    """
    _, last = attend(state, -window)
    return {**state, **{n: devices.from_previous(last[n]) for n in names}}


def _empty_state(query, value, config):
    dtype = accumulator_dtype(query, value)
    sizes = (shape_of(query)[0], query.shape[2], config.num_features)
    return linear_attention_state(*sizes, shape_of(value)[-1], dtype)


def _gather(devices, state):
    """The states of all devices, `(devices, ...)`, in one transfer."""
    normalizer = state["normalizer"][..., None]
    scale = ops.broadcast_to(state["log_scale"][..., None, None], shape_of(normalizer))
    parts = ops.concatenate([state["sum"], normalizer, scale], axis=-1)
    parts = devices.all_gather(parts)
    return {
        "sum": parts[..., :-2],
        "normalizer": parts[..., -2],
        "log_scale": parts[..., 0, -1],
    }


def _total(states, seen):
    """The sum of the seen devices' states `(devices, ...)`."""
    scales = where(seen[:, None, None], states["log_scale"], LOG_ZERO)
    largest = ops.max(scales, axis=0)
    weights = ops.exp(scales - largest) * ops.cast(seen, scales.dtype)[:, None, None]
    return {
        "sum": ops.sum(states["sum"] * weights[..., None, None], axis=0),
        "normalizer": ops.sum(states["normalizer"] * weights[..., None], axis=0),
        "log_scale": largest,
    }
