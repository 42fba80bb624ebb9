"""Sparse attention: the strided and fixed factorisations of Sparse Transformers."""

from keras import ops

from keras_efficient_attn.ops.common.block_softmax import attend_near, attend_recent
from keras_efficient_attn.ops.common.cache_capacity import nan_beyond
from keras_efficient_attn.ops.common.checks import check_pattern_call, is_positive_int
from keras_efficient_attn.ops.common.compiled import compiled
from keras_efficient_attn.ops.common.inputs import (
    extended,
    fitted,
    masked_inputs,
    recent_keys,
)
from keras_efficient_attn.ops.common.masked_softmax import masked_attention
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.common.state import make_state
from keras_efficient_attn.ops.sparse_attention.fixed import (
    attend_cached_summaries,
    attend_summaries,
    write_summaries,
)
from keras_efficient_attn.ops.sparse_attention.patterns import (
    Columns,
    Summaries,
    check_sparse_pattern,
    far_heads,
    near_heads,
    near_rule,
    sparse_pattern,
)
from keras_efficient_attn.ops.sparse_attention.strided import (
    attend_cached_columns,
    attend_columns,
    write_positions,
)

FAR = ("far_key", "far_value", "far_mask")


def sparse_attention(
    query,
    key,
    value,
    *,
    pattern="strided",
    stride,
    summary=1,
    heads="merged",
    causal=False,
    key_mask=None,
    scale=None,
    state=None,
    dropout=0.0,
    dropout_seed=None,
    implementation=None,
):
    """Softmax attention over a pattern of two factors, which reach every key in two.

    ```
    output[t] = Σ_s exp(scale · q[t]·k[s]) v[s] / Σ_s exp(scale · q[t]·k[s])
    ```

    over the keys `s` of the pattern that `key_mask` keeps. With `l` for `stride` and
    `c` for `summary`, the factors are

    ```
    strided  0:  |t - s| ≤ l               1:  (t - s) mod l = 0
    fixed    0:  ⌊t / l⌋ = ⌊s / l⌋         1:  s mod l in c positions of the block
    ```

    and, if `causal`, `s ≤ t`. The sequence is cut into blocks for the first factor and
    into columns or summaries for the second, so that time and memory are those of the
    pattern, `length · (l + length / l)` and `length · (l + c · length / l)`: with
    `l = √length`, they grow as `length^1.5`. A query that sees no key gets zeros.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`. Position `s` is the same as the
            query's position `s`, whatever the lengths.
        value: `(batch, key_length, heads, value_dim)`.
        pattern: `"strided"` (the default), for data with the period `stride`, such as
            the rows of an image, or `"fixed"`, for text.
        stride: Positive integer.
        summary: Positions of each block that stand for it in the fixed pattern.
            Different heads have different ones, from the end of the block to its
            start, in turn. Defaults to 1.
        heads: `"merged"` (the default): each head sees both factors, a key of both
            once. `"split"`: the first half of the heads has factor 0, the others
            have factor 1. `0` or `1`: all heads have that factor.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            What stands at other keys is not read, NaN included.
        scale: Of the dot products. Defaults to `1 / √dim`.
        state: Optional state from `sparse_attention_state` or an earlier call: the
            keys of earlier segments. Needs `causal=True` and equal lengths.
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
    >>> x = keras.random.normal((1, 1024, 4, 32))
    >>> ops.sparse_attention(x, x, x, stride=32, causal=True).shape
    (1, 1024, 4, 32)

    Reference:
        - [Child et al., 2019](https://arxiv.org/abs/1904.10509)
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
    pattern = dict(pattern=pattern, stride=stride, summary=summary, heads=heads)
    num_heads = query.shape[2]
    check_sparse_pattern(**pattern, num_heads=num_heads)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "reference":
        lengths = query.shape[1], key.shape[1]
        allowed = sparse_pattern(
            max(lengths), **pattern, num_heads=num_heads, causal=causal
        )
        output = masked_attention(
            query,
            key,
            value,
            allowed[:, : lengths[0], : lengths[1]],
            key_mask,
            scale,
        )
        return ops.cast(output, value.dtype)
    output, new_state = _sparse_attention(
        query,
        key,
        value,
        key_mask,
        state,
        dropout_seed,
        causal=causal,
        scale=scale,
        dropout=dropout,
        **pattern,
    )
    output = ops.cast(output, value.dtype)
    return output if state is None else (output, new_state)


@compiled("pattern", "stride", "summary", "heads", "causal", "scale", "dropout")
def _sparse_attention(
    query,
    key,
    value,
    key_mask,
    state,
    seed,
    *,
    pattern,
    stride,
    summary,
    heads,
    causal,
    scale,
    dropout,
):
    length, num_heads = ops.shape(query)[1], query.shape[2]
    query, key, value, valid = masked_inputs(query, key, value, key_mask)
    if state is None:
        query, key, value, valid = fitted(query, key, value, valid)
    query = query * scale
    # The first heads have the first factor, and the last ones the second.
    near = near_heads(heads, num_heads)
    far = num_heads - far_heads(heads, num_heads)
    parts, new_state = [], {}
    if near:
        inputs = (query[:, :, :near], key[:, :, :near], value[:, :, :near], valid)
        dropped = (dropout, seed) if dropout else None
        rule = near_rule(pattern, stride, causal)
        part, recent = _near(inputs, rule, state, dropped)
        parts.append(part)
        new_state |= recent
    if far < num_heads:
        inputs = (query[:, :, far:], key[:, :, far:], value[:, :, far:], valid)
        # Other bits than those of the first factor.
        dropped = (dropout, ops.flip(seed)) if dropout else None
        remainder = heads == "merged"
        if pattern == "strided":
            rule = Columns(stride, causal, remainder)
            part, cache = _columns(inputs, rule, state, dropped)
        else:
            rule = Summaries(stride, causal, remainder)
            part, cache = _summaries(inputs, rule, summary, state, dropped)
        parts.append(part)
        new_state |= cache
    if heads == "merged":
        output = finish(*merge(parts), True)
    else:
        output = ops.concatenate([finish(*part, True) for part in parts], axis=2)
    if state is None:
        return output[:, :length], None
    if far < num_heads:
        capacity = ops.shape(state["far_key"])[1]
        if pattern == "fixed":
            capacity = capacity // summary * stride
        output = nan_beyond(capacity, state["position"][0], output)
    return output, {**new_state, "position": state["position"] + length}


def _near(inputs, rule, state, dropout):
    """The part of the first factor, and what a state keeps for it."""
    if state is None:
        return attend_near(*inputs, rule, dropout), {}
    query, *keys = inputs
    past, position = extended(state, *keys), state["position"]
    part = attend_recent(query, *past, rule, position[0], dropout=dropout)
    return part, recent_keys(past, ops.shape(query)[1], position)


def _columns(inputs, rule, state, dropout):
    """The part of the strided pattern's second factor, and the cache of all keys."""
    if state is None:
        return attend_columns(*inputs, rule, dropout), {}
    query, *keys = inputs
    start = state["position"][0]
    cache = [
        write_positions(ops.cast(state[name], new.dtype), new, start)
        for name, new in zip(FAR, keys, strict=True)
    ]
    part = attend_cached_columns(query, *cache, rule, start, dropout)
    return part, dict(zip(FAR, cache, strict=True))


def _summaries(inputs, rule, summary, state, dropout):
    """The part of the fixed pattern's second factor, and the cache of summaries."""
    if state is None:
        return attend_summaries(*inputs, rule, summary, dropout), {}
    query, key, value, valid = inputs
    start = state["position"][0]
    valid = ops.broadcast_to(valid[..., None], ops.shape(key)[:3])
    cache = [
        write_summaries(
            ops.cast(state[name], new.dtype), new, rule.stride, summary, start
        )
        for name, new in zip(FAR, (key, value, valid), strict=True)
    ]
    part = attend_cached_summaries(query, *cache, rule, summary, start, dropout)
    return part, dict(zip(FAR, cache, strict=True))


def sparse_attention_state(
    batch_size,
    num_heads,
    key_dim,
    value_dim,
    max_length,
    *,
    pattern="strided",
    stride,
    summary=1,
    heads="merged",
    dtype="float32",
):
    """The state of causal sparse attention before the first position.

    The strided pattern's second factor needs every key again, `stride` positions
    later: its cache holds all of them, of which a token reads `max_length / stride`.
    The fixed pattern keeps summaries only.

    Args:
        batch_size, num_heads, key_dim, value_dim: Sizes.
        max_length: Positions that the second factor's cache has room for, rounded up
            to whole blocks; outputs beyond are NaN.
        pattern, stride, summary, heads: As for `sparse_attention`.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of `"position"` `(batch,)`, the number of positions read; for the first
        factor the recent `"key"`, `"value"` and `"mask"`; for the second
        `"far_key"`, `"far_value"` and `"far_mask"`. Batch first.

    Raises:
        ValueError: For arguments that make no pattern.
    """
    options = dict(pattern=pattern, stride=stride, summary=summary, heads=heads)
    sizes = (batch_size, num_heads, key_dim, value_dim, max_length)
    return make_state(sparse_attention_state_spec(*sizes, **options, dtype=dtype))


def sparse_attention_state_spec(
    batch_size,
    num_heads,
    key_dim,
    value_dim,
    max_length,
    *,
    pattern,
    stride,
    summary,
    heads,
    dtype,
):
    """Names, shapes and dtypes of `sparse_attention_state`."""
    check_sparse_pattern(pattern, stride, summary, heads, num_heads)
    if not is_positive_int(max_length):
        raise ValueError(
            f"`max_length` must be a positive integer. Received: {max_length!r}"
        )
    spec = {"position": ((batch_size,), "int32")}
    near, far = near_heads(heads, num_heads), far_heads(heads, num_heads)
    if near:
        rows = (batch_size, near_rule(pattern, stride, True).reach)
        spec["key"] = ((*rows, near, key_dim), dtype)
        spec["value"] = ((*rows, near, value_dim), dtype)
        spec["mask"] = (rows, dtype)
    if far:
        blocks = -(-max_length // stride)
        strided = pattern == "strided"
        rows = (batch_size, blocks * (stride if strided else summary))
        spec["far_key"] = ((*rows, far, key_dim), dtype)
        spec["far_value"] = ((*rows, far, value_dim), dtype)
        spec["far_mask"] = (rows if strided else (*rows, far), dtype)
    return spec
