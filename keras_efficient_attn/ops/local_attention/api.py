"""Local attention: softmax over keys near the query, in a sequence or an image."""

import numpy as np
from keras import ops

from keras_efficient_attn.ops.common.inputs import (
    SoftmaxOptions,
    check_call,
)
from keras_efficient_attn.ops.common.masked_softmax import masked_attention
from keras_efficient_attn.ops.common.recent_keys import recent_keys_spec
from keras_efficient_attn.ops.common.state import make_state
from keras_efficient_attn.ops.local_attention.blocks import attend_in_blocks
from keras_efficient_attn.ops.local_attention.config import LocalConfig
from keras_efficient_attn.ops.local_attention.recurrent import attend_next


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

    over the keys `s` near `t` that `key_mask` keeps. Only blocks that hold such keys
    are computed. One token with a `state` is computed by itself, in few operations.
    The keys near a query are, one of:

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
            Other keys are not read, NaN included.
        scale: Factor of the dot products. Defaults to `1 / √dim`.
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
    config = LocalConfig(window, query_block, memory, grid, order)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = SoftmaxOptions(bool(causal), scale, dropout)
    inputs = query, key, value, key_mask
    check_call(inputs, options, state, dropout_seed, implementation)
    for name, tensor in (("query", query), ("key", key)):
        shape = tuple(tensor.shape)
        config.check_length(f"{name}.shape", shape[1], shape)
    if implementation == "reference":
        allowed = _allowed(config, query.shape[1], key.shape[1], causal)
        output = masked_attention(*inputs[:3], allowed[None], key_mask, scale)
        return ops.cast(output, value.dtype)
    recurrent = state is not None and query.shape[1] == 1
    attend = attend_next if recurrent else attend_in_blocks
    output, new_state = attend(
        inputs, state, dropout_seed, config=config, options=options
    )
    output = ops.cast(output, value.dtype)
    return output if state is None else (output, new_state)


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
    config = LocalConfig(window, query_block, memory, grid, order)
    reach = config.mask_fn(causal=True).reach
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
    config = LocalConfig(window, query_block, memory, grid, order)
    config.check_length("length", length, length)
    return _allowed(config, length, length, causal)


def _allowed(config, query_length, key_length, causal):
    i, j = np.arange(query_length)[:, None], np.arange(key_length)[None, :]
    return config.mask_fn(causal)(i, j)
