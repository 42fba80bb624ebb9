"""Attention whose reach is a number that can be learned."""

from keras import ops

from keras_efficient_attn.ops.adaptive_span.bands import attend_bands
from keras_efficient_attn.ops.adaptive_span.reference import reference_attention
from keras_efficient_attn.ops.common.checks import check_pattern_call, is_positive_int
from keras_efficient_attn.ops.common.chunking import pad_length
from keras_efficient_attn.ops.common.compiled import compiled
from keras_efficient_attn.ops.common.inputs import (
    RECENT,
    extended,
    fitted,
    masked_inputs,
    recent_keys,
    recent_keys_spec,
)
from keras_efficient_attn.ops.common.online_softmax import finish
from keras_efficient_attn.ops.common.state import make_state

RAMP = 32


def adaptive_span_attention(
    query,
    key,
    value,
    spans,
    *,
    window,
    ramp=RAMP,
    position_key=None,
    causal=False,
    key_mask=None,
    scale=None,
    state=None,
    dropout=0.0,
    dropout_seed=None,
    implementation=None,
):
    """Softmax attention under a soft mask that ends at a span, and has its gradient.

    ```
    m(x) = min(max((ramp + span − x) / ramp, 0), 1)
    w[t, s] = m(|t − s|) exp(scale · q[t]·(k[s] + p[|t − s|]))     if |t − s| < window
    output[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    over the keys `s` that `key_mask` keeps. Time and memory grow with `length ·
    window`. A window of `span + ramp` keys or more cuts nothing off. A query that sees
    no key gets zeros.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`. Position `s` is the same as the
            query's position `s`, whatever the lengths.
        value: `(batch, key_length, heads, value_dim)`.
        spans: In positions, of each head `(heads,)`, or of each query and head
            `(batch, query_length, heads)`.
        window: Positive integer: a query sees itself and at most `window - 1` earlier
            keys and, if not causal, as many later ones.
        ramp: Positive number: positions over which the mask falls from 1 to 0.
            Defaults to 32.
        position_key: Optional `(distances, dim)`, at least `window` of them: the p of
            each distance.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            What stands at other keys is not read, NaN included.
        scale: Of the dot products. Defaults to `1 / √dim`.
        state: Optional state from `adaptive_span_state` or an earlier call: the keys
            of earlier segments. Needs `causal=True` and equal lengths. It may be of
            another window: keys beyond a shorter window are forgotten, and keys that a
            shorter one did not keep stay unseen.
        dropout: Rate of dropout on the normalised weights. Defaults to 0.
        dropout_seed: Floats `(2,)` from `weight_dropout.dropout_seed`, for `dropout`.
        implementation: `"blocks"` (the default) or `"reference"`, the quadratic
            definition.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, the pair of that and the state after the last position.

    Raises:
        ValueError: For shapes that do not agree, or arguments named above that
            cannot be honoured.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 1000, 4, 32))
    >>> spans = keras.ops.array([0.0, 10.0, 20.0, 90.0])
    >>> ops.adaptive_span_attention(x, x, x, spans, window=128, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Sukhbaatar et al., 2019](https://arxiv.org/abs/1905.07799)
    """
    check_pattern_call(
        query,
        key,
        value,
        key_mask,
        causal,
        state,
        implementation,
        dropout,
        dropout_seed,
    )
    _check(query, spans, window, ramp, position_key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if position_key is not None:
        position_key = position_key[:window]
    if implementation == "reference":
        output = reference_attention(
            query,
            key,
            value,
            spans,
            window,
            ramp,
            position_key,
            causal,
            key_mask,
            scale,
        )
        return ops.cast(output, value.dtype)
    output, new_state = _adaptive_span_attention(
        query,
        key,
        value,
        spans,
        position_key,
        key_mask,
        state,
        dropout_seed,
        window=window,
        ramp=ramp,
        causal=causal,
        scale=scale,
        dropout=dropout,
    )
    output = ops.cast(output, value.dtype)
    return output if state is None else (output, new_state)


@compiled("window", "ramp", "causal", "scale", "dropout")
def _adaptive_span_attention(
    query,
    key,
    value,
    spans,
    position_key,
    key_mask,
    state,
    seed,
    *,
    window,
    ramp,
    causal,
    scale,
    dropout,
):
    length = ops.shape(query)[1]
    query, key, value, valid = masked_inputs(query, key, value, key_mask)
    query = query * scale
    new_state = None
    if state is None:
        query, key, value, valid = fitted(query, key, value, valid)
        longest = query.shape[1]
        if isinstance(longest, int):
            # No query has more keys on one side.
            window = max(1, min(window, longest))
        past = tuple(pad_length(t, window - 1, 0) for t in (key, value, valid))
    else:
        past = extended(_of_window(state, window), key, value, valid)
        new_state = recent_keys(past, length, state["position"])
    if position_key is not None:
        position_key = ops.cast(position_key[:window], query.dtype)
    part = attend_bands(
        query,
        *past,
        ops.cast(spans, query.dtype),
        window=window,
        causal=causal,
        ramp=ramp,
        position_key=position_key,
        dropout=(dropout, seed) if dropout else None,
    )
    return finish(*(t[:, :length] for t in part), True), new_state


def adaptive_span_state(
    batch_size, num_heads, key_dim, value_dim, *, window, dtype="float32"
):
    """The state of causal attention in a window before the first position.

    Args:
        batch_size, num_heads, key_dim, value_dim: Sizes.
        window: As for `adaptive_span_attention`.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of `"key"`, `"value"` `(batch, window - 1, heads, dim)` and `"mask"`
        `(batch, window - 1)`, the last keys, and of `"position"` `(batch,)`, the
        number of positions read.
    """
    sizes = (batch_size, window - 1, num_heads, key_dim, value_dim)
    return make_state(recent_keys_spec(*sizes, dtype))


def _of_window(state, window):
    """The last keys of a state, as many as belong to the state of a window."""
    excess = state["mask"].shape[1] - (window - 1)
    fit = {}
    for name in RECENT:
        t = state[name]
        fit[name] = t[:, excess:] if excess > 0 else pad_length(t, -excess, 0)
    return fit


def _check(query, spans, window, ramp, position_key):
    """Raises `ValueError` for what is this operation's own."""
    if not is_positive_int(window):
        raise ValueError(
            f"`window` must be a positive integer. Received: window={window!r}"
        )
    if not isinstance(ramp, int | float) or isinstance(ramp, bool) or not ramp > 0:
        raise ValueError(f"`ramp` must be a positive number. Received: ramp={ramp!r}")
    shape, heads = tuple(spans.shape), query.shape[2]
    if len(shape) not in (1, 3) or shape[-1] != heads:
        raise ValueError(
            "`spans` must have the shape (heads,) or (batch, query_length, heads), "
            f"with {heads} heads. Received: spans.shape={shape}"
        )
    if position_key is None:
        return
    shape = tuple(position_key.shape)
    if len(shape) != 2 or shape[0] < window or shape[1] != query.shape[-1]:
        raise ValueError(
            "`position_key` must have the shape (distances, dim), with as many "
            "distances as the window or more, and the dim of `query`. Received: "
            f"position_key.shape={shape}, window={window}, "
            f"query.shape={tuple(query.shape)}"
        )
