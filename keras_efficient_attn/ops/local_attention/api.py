"""Local attention: softmax over keys near the query, in a sequence or an image."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common import masked_softmax as reference
from keras_efficient_attn.ops.common.block_softmax import (
    attend_at,
    attend_near,
    attend_recent,
    keys_seen,
)
from keras_efficient_attn.ops.common.checks import (
    check_pattern_call,
    is_pair,
    is_positive_int,
)
from keras_efficient_attn.ops.common.compiled import compiled
from keras_efficient_attn.ops.common.inputs import (
    extended,
    fitted,
    masked_inputs,
    recent_keys,
    recent_keys_spec,
)
from keras_efficient_attn.ops.common.masks import QueryBlocks, SlidingWindow
from keras_efficient_attn.ops.common.online_softmax import finish
from keras_efficient_attn.ops.common.state import make_state
from keras_efficient_attn.ops.local_attention.grid import (
    attend_grid,
    generation_order,
    grid_rule,
)

WINDOW = 128
ORDERS = ("raster", "block")


def local_attention(
    query,
    key,
    value,
    *,
    window=None,
    query_block=None,
    memory=None,
    grid=None,
    order="raster",
    causal=False,
    key_mask=None,
    scale=None,
    state=None,
    dropout=0.0,
    dropout_seed=None,
    implementation=None,
):
    """Softmax attention to the keys near the query, in linear time and memory.

    ```
    output[t] = Σ_s exp(scale · q[t]·k[s]) v[s] / Σ_s exp(scale · q[t]·k[s])
    ```

    over the keys `s` near `t` that `key_mask` keeps. Only these products are computed,
    but for the edges of blocks. What is near, one of:

    - `window`: itself and `window - 1` earlier keys and, if not causal, as many later
      ones.
    - `query_block` an integer: the query's own block of that many positions, and
      `memory` positions before it. Causal: up to the query; otherwise all of the
      block, and `memory` positions after it.
    - `query_block` a pair and `grid`: the query's own rectangle of rows and columns
      in an image, and a halo of `memory` rows above and `memory` columns left and
      right of it. Causal: what the image has before the query in the order in which
      it grows; otherwise all of that, and the rows below. The sequence is the image
      in that order, or the beginning of it.

    A query that sees no key gets zeros.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`. Position `s` is the same as the
            query's position `s`, whatever the lengths.
        value: `(batch, key_length, heads, value_dim)`.
        window: Positive integer. Defaults to 128 without `query_block`.
        query_block: Positive integer, or a pair of them.
        memory: Integer that is not negative, or a pair. Defaults to `query_block`.
        grid: Rows and columns of the image, for a pair `query_block`.
        order: `"raster"` (row by row, the default) or `"block"` (rectangle by
            rectangle, row by row in each), for a `grid`.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            What stands at other keys is not read, NaN included.
        scale: Of the dot products. Defaults to `1 / √dim`.
        state: Optional state from `local_attention_state` or an earlier call: the
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
    >>> x = keras.random.normal((1, 1000, 4, 32))
    >>> ops.local_attention(x, x, x, window=64, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Parmar et al., 2018](https://arxiv.org/abs/1802.05751)
    """
    window, query_block, memory, grid = check_local_pattern(
        window, query_block, memory, grid, order
    )
    pattern = dict(
        window=window, query_block=query_block, memory=memory, grid=grid, order=order
    )
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
    if grid is not None:
        for name, tensor in (("query", query), ("key", key)):
            if tensor.shape[1] is not None and _longer(tensor.shape[1], grid):
                raise ValueError(
                    f"`grid` {grid} must hold all positions. Received: "
                    f"{name}.shape={tuple(tensor.shape)}"
                )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "reference":
        lengths = query.shape[1], key.shape[1]
        allowed = local_pattern(max(lengths), causal=causal, **pattern)
        output = reference.masked_attention(
            query,
            key,
            value,
            allowed[None, : lengths[0], : lengths[1]],
            key_mask,
            scale,
        )
        return ops.cast(output, value.dtype)
    output, new_state = _local_attention(
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


@compiled(
    "window",
    "query_block",
    "memory",
    "grid",
    "order",
    "causal",
    "scale",
    "dropout",
)
def _local_attention(
    query,
    key,
    value,
    key_mask,
    state,
    seed,
    *,
    window,
    query_block,
    memory,
    grid,
    order,
    causal,
    scale,
    dropout,
):
    length = ops.shape(query)[1]
    query, key, value, valid = masked_inputs(query, key, value, key_mask)
    query = query * scale
    dropped = (dropout, seed) if dropout else None
    rule = local_rule(window, query_block, memory, grid, order, causal)
    if state is not None:
        past = extended(state, key, value, valid)
        codes = None
        if grid is not None:
            codes = generation_order(grid, query_block, order == "block")
        start = state["position"][0]
        part = attend_recent(query, *past, rule, start, codes, dropped)
        state = recent_keys(past, length, state["position"])
        return finish(*part, True), state
    query, key, value, valid = fitted(query, key, value, valid)
    if grid is None:
        part = attend_near(query, key, value, valid, rule, dropped)
    else:
        part = attend_grid(query, key, value, valid, grid, rule, dropped)
    return finish(*(t[:, :length] for t in part), True), None


def local_attention_at(
    position,
    query,
    key,
    value,
    *,
    window=None,
    query_block=None,
    memory=None,
    key_mask=None,
):
    """Causal `local_attention` over a sequence for one of its queries alone.

    Args:
        position: Of the query among the keys, an integer or a scalar.
        query: `(batch, 1, heads, dim)`.
        key, value, window, query_block, memory, key_mask: As for `local_attention`.

    Returns:
        `(batch, 1, heads, value_dim)` in the accumulator's dtype.
    """
    checked = check_local_pattern(window, query_block, memory, None, "raster")
    rule = local_rule(*checked, "raster", True)
    first, (key, value, key_mask) = keys_seen(position, rule, key, value, key_mask)
    query, key, value, valid = masked_inputs(query, key, value, key_mask)
    query = query * query.shape[-1] ** -0.5
    part = attend_at(position, query, key, value, valid, rule, first)
    return finish(*part, True)


def local_rule(window, query_block, memory, grid, order, causal):
    """The rule of checked arguments."""
    if window is not None:
        return SlidingWindow(window, causal)
    if grid is None:
        return QueryBlocks(query_block, memory, causal)
    return grid_rule(grid, query_block, memory, order == "block", causal)


def local_attention_state(
    batch_size,
    num_heads,
    key_dim,
    value_dim,
    *,
    window=None,
    query_block=None,
    memory=None,
    grid=None,
    order="raster",
    dtype="float32",
):
    """The state of causal local attention before the first position.

    Args:
        batch_size, num_heads, key_dim, value_dim: Sizes.
        window, query_block, memory, grid, order: As for `local_attention`.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of `"key"`, `"value"` `(batch, reach, heads, dim)` and `"mask"`
        `(batch, reach)`, the last keys, as far back as a query sees, and of
        `"position"` `(batch,)`, the number of positions read.
    """
    checked = check_local_pattern(window, query_block, memory, grid, order)
    reach = local_rule(*checked, order, True).reach
    sizes = (batch_size, reach, num_heads, key_dim, value_dim)
    return make_state(recent_keys_spec(*sizes, dtype))


def local_pattern(
    length,
    *,
    window=None,
    query_block=None,
    memory=None,
    grid=None,
    order="raster",
    causal=False,
):
    """Which keys each query of `local_attention` sees, for plots and tests.

    Args:
        length: Number of positions.
        window, query_block, memory, grid, order, causal: As for `local_attention`.

    Returns:
        Boolean NumPy array `(length, length)`: rows are queries.

    Example:

    >>> from keras_efficient_attn.ops import local_pattern
    >>> local_pattern(4, window=2, causal=True).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    """
    window, query_block, memory, grid = check_local_pattern(
        window, query_block, memory, grid, order
    )
    rule = local_rule(window, query_block, memory, grid, order, causal)
    positions = np.arange(length)
    if grid is not None:
        if _longer(length, grid):
            raise ValueError(
                f"`grid` {grid} must hold all positions. Received: length={length}"
            )
        positions = generation_order(grid, query_block, order == "block")[:length]
    return rule(positions[:, None], positions[None, :])


def check_local_pattern(window, query_block, memory, grid, order):
    """`(window, query_block, memory, grid)` with defaults, pairs as tuples.

    Raises:
        ValueError: If they do not make a pattern.
    """
    if query_block is None:
        for name, argument in (("memory", memory), ("grid", grid)):
            if argument is not None:
                raise ValueError(
                    f"`{name}` is for a `query_block`. Received: {name}={argument!r}, "
                    "query_block=None"
                )
        window = WINDOW if window is None else window
        if not is_positive_int(window):
            raise ValueError(
                f"`window` must be a positive integer. Received: window={window!r}"
            )
    elif window is not None:
        raise ValueError(
            "`window` and `query_block` exclude each other. Received: "
            f"window={window!r}, query_block={query_block!r}"
        )
    paired = query_block is not None and not isinstance(query_block, int)
    if paired:
        memory = query_block if memory is None else memory
        if not is_pair(query_block, 1):
            raise ValueError(
                "`query_block` must be a positive integer, or a pair of them. "
                f"Received: query_block={query_block!r}"
            )
        if not is_pair(memory, 0):
            raise ValueError(
                "`memory` must be a pair of integers that are not negative, as "
                f"`query_block` is a pair. Received: memory={memory!r}"
            )
        if not is_pair(grid, 1):
            raise ValueError(
                "`grid` must be the rows and columns of the image, as `query_block` "
                f"is a pair. Received: grid={grid!r}"
            )
        query_block, memory, grid = tuple(query_block), tuple(memory), tuple(grid)
    elif query_block is not None:
        memory = query_block if memory is None else memory
        if not is_positive_int(query_block):
            raise ValueError(
                "`query_block` must be a positive integer, or a pair of them. "
                f"Received: query_block={query_block!r}"
            )
        if not isinstance(memory, int) or memory < 0:
            raise ValueError(
                "`memory` must be an integer that is not negative, as `query_block` "
                f"is one. Received: memory={memory!r}"
            )
        if grid is not None:
            raise ValueError(
                "`grid` is for a pair `query_block`. Received: "
                f"grid={grid!r}, query_block={query_block!r}"
            )
    if order not in ORDERS or (order != "raster" and not paired):
        raise ValueError(
            f"`order` must be one of {', '.join(ORDERS)}; 'block' is for a pair "
            f"`query_block`. Received: order={order!r}, query_block={query_block!r}"
        )
    return window, query_block, memory, grid


def _longer(length, grid):
    return isinstance(length, int) and length > grid[0] * grid[1]
