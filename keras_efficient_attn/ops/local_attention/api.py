"""Local attention: softmax over keys near the query, in a sequence or an image."""

from keras import ops

from keras_efficient_attn.ops.common.inputs import SoftmaxCall
from keras_efficient_attn.ops.common.interval_softmax.choice import KERNELS
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.common.state import (
    check_state,
    make_state,
    recent_keys_spec,
)
from keras_efficient_attn.ops.local_attention.blocks import (
    attend_by_kernel,
    attend_in_blocks,
    attend_next,
)
from keras_efficient_attn.ops.local_attention.config import LocalConfig
from keras_efficient_attn.ops.local_attention.reference import (
    reference_attention,
    visible_keys,
)

# The forms of `SoftmaxCall.attend`; the kernel adds no `window_bias`.
FORMS = attend_in_blocks, attend_next, reference_attention, attend_by_kernel


@symbolic
def local_attention(
    query,
    key,
    value,
    *,
    window: int | None = None,
    query_block=None,
    memory=None,
    grid=None,
    grid_order: str = "raster",
    causal: bool = False,
    key_mask=None,
    scale: float | None = None,
    state=None,
    dropout=None,
    implementation: str | None = None,
    window_bias=None,
):
    """Softmax attention to the keys near the query, in linear time and memory.

    ```
    w[t, s]   = exp(scale · q[t]·k[s] + b[t - s])  if s is near t
    output[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    over the keys `s` that `key_mask` keeps. Only blocks with such keys are computed.
    One token with a `state` uses few operations. The keys near a query are one of:

    - `window`: itself and `window - 1` earlier keys and, if not causal, as many later
      ones.
    - `query_block` an integer: the query's own block of that many positions, and
      `memory` positions before it. Causal: up to the query; otherwise all of the
      block, and `memory` positions after it.
    - `query_block` a pair and `grid`: the query's own rectangle of rows and columns
      in an image, and a halo of `memory` rows above and `memory` columns left and
      right of it. Causal: the part of this area before the query in the image's order;
      otherwise all of it, and also `memory` rows below. The sequence is the image in
      that order, or its beginning.

    A query that sees no key gets zeros.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`. Key `s` and query `s` have the same
            position, for any lengths.
        value: `(batch, key_length, heads, value_dim)`.
        window: Positive integer. Defaults to 128 without `query_block`.
        query_block: Positive integer, or a pair of them.
        memory: Non-negative integer, or a pair. Defaults to `query_block`.
        grid: Rows and columns of the image, for a pair `query_block`.
        grid_order: `"raster"` (row by row, the default) or `"block"` (rectangle by
            rectangle, row by row in each), for a `grid`.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            Other keys are not read, NaN included.
        scale: Factor of the dot products. Defaults to `1 / √dim`.
        state: Optional state from `local_attention_state` or an earlier call: the
            earlier keys that a query can see. Needs `causal=True` and equal lengths.
        dropout: Optional `(rate, seed)` of dropout on the normalised weights, with
            floats `(2,)` from `ops.common.random.dropout_seed`.
        implementation: `"blocks"`, for every backend and device; `"splash"`, JAX's
            splash attention for TPUs, or `"flex"`, PyTorch's FlexAttention for CUDA:
            both without `grid`, `state` and `dropout`, and for static sizes; or
            `"reference"`: the quadratic definition, without `state` and `dropout`.
            Defaults to `None`: the device's kernel if it can run (a TPU, or several
            under a `keras.distribution`; a CUDA device and heads of 16 or more),
            otherwise blocks. On a CPU, `"splash"` is interpreted and `"flex"` has no
            gradients.
        window_bias: Optional `(distances, heads)`, the `b` of the distances `t - s` in
            a `window`, the largest first: `window - 1, …, 0` and, if not causal,
            `…, 1 - window`. Excludes kernels. Defaults to `None`: 0.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, the pair of that and the state after the last position. Outputs of a
        call that reads beyond the `grid` are NaN.

    Raises:
        ValueError: If `window`, `query_block`, `memory`, `grid` and `grid_order` define
            no pattern, or one for shorter sequences; if shapes do not agree, if a
            `state` cannot be continued by this call, for an invalid `dropout`, for a
            `window_bias` without a `window` or of another shape, or if a requested
            kernel cannot run.
        TypeError: If `value` is not of a floating-point dtype.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 1000, 4, 32))
    >>> ops.local_attention(x, x, x, window=64, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Parmar et al., 2018](https://arxiv.org/abs/1802.05751)
    """
    config = LocalConfig(window, query_block, memory, grid, grid_order)
    inputs = query, key, value, key_mask
    call = SoftmaxCall.checked(
        inputs, causal, scale, state, dropout, implementation, tuple(KERNELS)
    )
    for name, tensor in (("query", query), ("key", key)):
        shape = tuple(tensor.shape)
        config.check_length(f"{name}.shape", shape[1], shape)
    if state is not None:
        sizes = (key.shape[0], *key.shape[2:], value.shape[-1])
        check_state(state, _state_spec(config, *sizes, None))
    if window_bias is not None:
        _check_window_bias(window_bias, query, config, call)
        window_bias = ops.cast(window_bias, accumulator_dtype(query, key, value))
    forms = FORMS if window_bias is None else FORMS[:3]
    return call.attend(config, forms, window_bias)


def local_attention_state(
    batch_size,
    num_heads,
    key_dim,
    value_dim,
    *,
    dtype="float32",
    **pattern,
):
    """The state of causal local attention before the first position.

    Args:
        batch_size, num_heads, key_dim, value_dim: Sizes.
        dtype: `"float32"` (the default) or `"float64"`.
        **pattern: `window`, `query_block`, `memory`, `grid`, `grid_order`, as for
            `local_attention`.

    Returns:
        Dict of `"key"`, `"value"` `(batch, reach, heads, dim)` and `"mask"`
        `(batch, reach)`, the last keys within a query's reach, and of `"position"`
        `(batch,)`, the number of positions read.
    """
    sizes = (batch_size, num_heads, key_dim, value_dim)
    return make_state(_state_spec(LocalConfig(**pattern), *sizes, dtype))


def _check_window_bias(window_bias, query, config, call):
    distances = None
    if config.window is not None:
        distances = config.window if call.options.causal else 2 * config.window - 1
    if tuple(window_bias.shape) != (distances, query.shape[2]):
        raise ValueError(
            "`window_bias` needs a `window`, and must have the shape (distances, "
            f"heads) = ({distances}, {query.shape[2]}). Received: "
            f"window_bias.shape={tuple(window_bias.shape)}, window={config.window}"
        )
    if call.implementation in KERNELS:
        raise ValueError(
            "`window_bias` needs implementation=None or 'blocks'. Received: "
            f"implementation={call.implementation!r}"
        )


def _state_spec(config, batch_size, *sizes_and_dtype):
    reach = config.mask_fn(causal=True).reach
    return recent_keys_spec(batch_size, reach, *sizes_and_dtype)


def local_pattern(length, *, causal: bool = False, **pattern):
    """The mask of `local_attention`, for plots and tests.

    Args:
        length: Number of positions.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        **pattern: `window`, `query_block`, `memory`, `grid`, `grid_order`, as for
            `local_attention`.

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
    config = LocalConfig(**pattern)
    config.check_length("length", length, length)
    return visible_keys(config, length, length, causal)
