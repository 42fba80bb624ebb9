"""Exact attention to the nearest keys, combined with features for far keys."""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.block_softmax import attend_recent
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.inputs import masked_inputs
from keras_efficient_attn.ops.common.interval_softmax.choice import attend_window
from keras_efficient_attn.ops.common.masks import SlidingWindow
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.common.plan import jit_on_jax
from keras_efficient_attn.ops.common.positions import bias_products
from keras_efficient_attn.ops.common.state import append_segment, keep_last
from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention_with_feature_maps,
)
from keras_efficient_attn.ops.linear_attention.recurrent import attend_to_all

STATE_NAMES = ("window_key", "window_value", "window_mask")


@jit_on_jax("config")
def windowed_linear_attention(
    tensors,
    config,
    map_weights=(),
    key_mask=None,
    state=None,
    window_bias=None,
    lengths=None,
    documents=None,
):
    """Linear attention with exact attention to the nearest keys.

    ```
    w[t, s] = exp(q[t] · k[s] + b[t - s])  if |t - s| < window
              φ(q[t]) · φ(k[s])            otherwise
    ```

    under one denominator. The feature map has to estimate `exp(q · k)`. Far keys are
    handled by causal linear attention over keys delayed by the window, so the operation
    stays linear, streams, and never subtracts.

    Args:
        tensors: `(query, key, value)`, each `(batch, length, heads, dim)`, equally
            long.
        config: `LinearAttentionConfig` with a `window`: a query sees itself and
            `window - 1` earlier keys exactly and, if not causal, as many later ones;
            `output` is `"normalized"` or `"sum"`.
        map_weights, key_mask: As for `linear_attention_with_feature_maps`.
        state: Optional state; needs `causal`. The linear state of the far keys, and
            the last `window` keys in `"window_key"`, `"window_value"` and
            `"window_mask"`.
        window_bias: Optional `b`, `(distances, heads)` in the order of
            `window_distances`. Defaults to `None`: 0.
        lengths: With a state, the positions of each row that exist, at its beginning:
            int32 `(batch,)`. Defaults to `None`: all.
        documents: As for `linear_attention_with_feature_maps`.

    Returns:
        `(output, state)`: `(batch, length, heads, value_dim)` in the accumulator's
        dtype, and the new state or `None`.
    """
    # An implementation that is named is the far keys', without a kernel for near ones.
    kernel_dtype = tensors[2].dtype if config.implementation is None else None
    query, key, value, valid = masked_inputs(*tensors, key_mask)
    length, window = shape_of(query)[1], config.window

    # The keys of this segment, and of the last `window` positions before it.
    if state is None:
        history = tuple(pad_length(t, window, 0) for t in (key, value, valid))
        far_state = None
    else:
        history = append_segment(state, key, value, valid, names=STATE_NAMES)
        far_state = {k: v for k, v in state.items() if k not in STATE_NAMES}

    far_config = dataclasses.replace(config, causal=True, output="partial", window=None)

    def far(query, delayed, state, position):
        key, value, valid = delayed
        own = None
        if documents is not None:
            # Delayed keys: those of the document, as far as they have arrived.
            own = documents._replace(position=position - window)
        return linear_attention_with_feature_maps(
            (query, key, value),
            far_config,
            map_weights=map_weights,
            key_mask=valid > 0,
            state=state,
            documents=own,
        )

    leaving = tuple(t[:, :length] for t in history)
    if lengths is not None:
        # A row's window loses as many keys as the row has new ones.
        leaves = ops.arange(length, dtype="int32") < lengths[:, None]
        leaving = *leaving[:2], leaving[2] * ops.cast(leaves, valid.dtype)
    position, later = None, None
    if documents is not None:
        position, later = documents.position, ops.flip(documents.later, axis=1)
    before, far_state = far(query, leaving, far_state, position)
    rule = SlidingWindow(window, config.causal)
    relative = bias_products(query, window_bias)
    if state is None:
        seen = None if key_mask is None else valid
        near = attend_window(
            (query, key, value), seen, rule, kernel_dtype, relative, documents
        )
    elif query.shape[1] == key.shape[1] == 1:
        near = attend_to_all(query, *(t[:, 1:] for t in history), window_bias)
    else:
        recent = (t[:, 1:] for t in history)
        near = attend_recent(query, *recent, rule, None, relative=relative)
    parts = [near, before]
    if not config.causal:
        delayed = tuple(
            pad_length(ops.flip(t[:, window:], axis=1), window, 0)[:, :length]
            for t in (key, value, valid)
        )
        after, _ = far(ops.flip(query, axis=1), delayed, None, later)
        parts.append(tuple(ops.flip(t, axis=1) for t in after))
    output = finish(*merge(parts), config.output == "normalized")
    if state is None:
        return output, None
    recent = (keep_last(t, length, lengths) for t in history)
    return output, {**far_state, **dict(zip(STATE_NAMES, recent, strict=True))}
