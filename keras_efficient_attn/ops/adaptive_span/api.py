"""Attention with a learnable span."""

from keras_efficient_attn.ops.adaptive_span.bands import (
    RAMP,
    SpanConfig,
    attend_in_bands,
    attend_next,
)
from keras_efficient_attn.ops.adaptive_span.reference import reference_attention
from keras_efficient_attn.ops.common.checks import may_agree
from keras_efficient_attn.ops.common.inputs import SoftmaxCall
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.common.state import (
    check_state,
    make_state,
    recent_keys_spec,
)

# The forms of `SoftmaxCall.attend`.
FORMS = attend_in_bands, attend_next, reference_attention


@symbolic
def adaptive_span_attention(
    query,
    key,
    value,
    spans,
    *,
    window,
    ramp: float = RAMP,
    include_self: bool = True,
    position_key=None,
    causal: bool = False,
    key_mask=None,
    scale: float | None = None,
    state=None,
    dropout=None,
    implementation: str | None = None,
):
    """Softmax attention under a soft mask with a differentiable span.

    ```
    m(x) = min(max((ramp + span − x) / ramp, 0), 1)
    w[t, s] = m(|t − s|) exp(scale · q[t]·(k[s] + p[|t − s|]))     if |t − s| < window
    output[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    over the keys `s` that `key_mask` keeps. Time and memory grow with `length ·
    window`. A window of at least `span + ramp` keys is exact. A query that sees no key
    gets zeros.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`. Key `s` and query `s` have the same
            position, for any lengths.
        value: `(batch, key_length, heads, value_dim)`.
        spans: Spans in positions, per head `(heads,)`, or per query and head `(batch,
            query_length, heads)`.
        window: Positive integer: a query sees itself and at most `window - 1` earlier
            keys and, if not causal, as many later ones.
        ramp: Positive number: positions over which the mask falls from 1 to 0.
            Defaults to 32.
        include_self: Whether a query sees the key of its own position; not in the
            paper. Defaults to `True`.
        position_key: Optional `(distances, dim)`, the p of each distance, at least
            `window` of them.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            Other keys are not read, NaN included.
        scale: Factor of the dot products. Defaults to `1 / √dim`.
        state: Optional state from `adaptive_span_state` or an earlier call, for
            `causal=True` and as many queries as keys. Its window may differ: keys
            beyond a shorter window are dropped, and keys that a shorter window did not
            keep remain unseen.
        dropout: Optional `(rate, seed)` of dropout on the normalised weights, with
            floats `(2,)` from `ops.common.random.dropout_seed`.
        implementation: `"blocks"`, or `"reference"`, the formula, which takes no
            `state` and no `dropout`. Defaults to `None`: a kernel on a TPU, or on
            several under a `keras.distribution`, for a `window` of at most 2,049 (1,025
            if not causal), without `position_key`, `state` and `dropout`; otherwise
            blocks.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, that and the last `window - 1` keys as a new state.

    Raises:
        ValueError: If `window` or `ramp` is not positive, if the shapes of `spans`,
            `position_key` or the other tensors do not fit, or if a `state` cannot be
            continued by this call.
        TypeError: If `value` is not of a floating-point dtype.

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
    inputs = query, key, value, key_mask
    call = SoftmaxCall.checked(inputs, causal, scale, state, dropout, implementation)
    config = SpanConfig(window, ramp, include_self, kernels=implementation is None)
    _check_operands(query, spans, position_key, window)
    if state is not None:
        sizes = (key.shape[0], None, *key.shape[2:], value.shape[-1])
        check_state(state, recent_keys_spec(*sizes, None))
    if position_key is not None:
        position_key = position_key[:window]
    return call.attend(config, FORMS, spans, position_key)


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
    reach = SpanConfig(window).window - 1
    sizes = (batch_size, reach, num_heads, key_dim, value_dim)
    return make_state(recent_keys_spec(*sizes, dtype))


def _check_operands(query, spans, position_key, window):
    """Raises `ValueError` for invalid shapes of this operation's own tensors."""
    batch, length, heads, _ = query.shape
    if not any(may_agree(spans.shape, x) for x in ((heads,), (batch, length, heads))):
        raise ValueError(
            "`spans` must have the shape (heads,) or (batch, query_length, heads) of "
            f"`query`. Received: spans.shape={tuple(spans.shape)}, "
            f"query.shape={tuple(query.shape)}"
        )
    if position_key is None:
        return
    shape = tuple(position_key.shape)
    if len(shape) != 2 or shape[0] < window or shape[1] != query.shape[-1]:
        raise ValueError(
            "`position_key` must have the shape (distances, dim), with at least "
            "`window` distances, and the dim of `query`. Received: "
            f"position_key.shape={shape}, window={window}, "
            f"query.shape={tuple(query.shape)}"
        )
