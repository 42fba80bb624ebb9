"""Sparse attention: the strided and fixed factorisations of Sparse Transformers."""

from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.common.inputs import SoftmaxCall
from keras_efficient_attn.ops.common.interval_softmax.choice import KERNELS
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.common.state import (
    check_state,
    make_state,
    recent_keys_spec,
)
from keras_efficient_attn.ops.sparse_attention.blocks import attend_in_blocks
from keras_efficient_attn.ops.sparse_attention.config import SparseConfig
from keras_efficient_attn.ops.sparse_attention.kernel_path import attend_by_kernel
from keras_efficient_attn.ops.sparse_attention.recurrent import attend_next
from keras_efficient_attn.ops.sparse_attention.reference import (
    reference_attention,
    visible_keys,
)

# The forms of `SoftmaxCall.attend`.
FORMS = attend_in_blocks, attend_next, reference_attention, attend_by_kernel


@symbolic
def sparse_attention(
    query,
    key,
    value,
    *,
    pattern: str = "strided",
    stride,
    summary: int = 1,
    factors: str | int = "merged",
    causal: bool = False,
    key_mask=None,
    scale: float | None = None,
    state=None,
    dropout=None,
    implementation: str | None = None,
):
    """Softmax attention over a pattern of two factors.

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
    into columns or summaries for the second, so that time and memory follow the
    pattern, `length · (l + length / l)` and `length · (l + c · length / l)`: with `l =
    √length`, they grow as `length^1.5`. A query that sees no key gets zeros.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`. Key `s` and query `s` have the same
            position, for any lengths.
        value: `(batch, key_length, heads, value_dim)`.
        pattern: `"strided"` (the default), for data with the period `stride`, such as
            the rows of an image, or `"fixed"`, for text.
        stride: Positive integer.
        summary: Positions of each block that all queries see in the fixed pattern.
            Each head has its own positions, assigned from the block's end to its start.
            Defaults to 1.
        factors: `"merged"` (the default): each head sees both factors; a key in both
            counts once. `"split"`: the first half of the heads has factor 0, the others
            have factor 1. `0` or `1`: all heads have that factor.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            Other keys are not read, NaN included.
        scale: Factor of the dot products. Defaults to `1 / √dim`.
        state: Optional state from `sparse_attention_state`, of the same pattern, or
            from an earlier call; for `causal=True` and as many queries as keys.
        dropout: Optional `(rate, seed)` of dropout on the normalised weights, with
            floats `(2,)` from `ops.common.random.dropout_seed`; each factor has its own
            random bits.
        implementation: `"blocks"`, for every backend and device; `"splash"`, JAX's
            splash attention for TPUs, or `"flex"`, PyTorch's FlexAttention for CUDA:
            both without `state` and `dropout`, for static sizes, and not for causal
            heads with summaries only; or `"reference"`: the matrix of `sparse_pattern`,
            without `state` and `dropout`. Defaults to `None`: the device's kernel if it
            can run (a TPU, or several under a `keras.distribution`; a CUDA device and
            heads of 16 or more), otherwise blocks. On a CPU, `"splash"` is interpreted
            and `"flex"` has no gradients.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, `(output, new state)`. Outputs beyond the state's capacity are NaN.

    Raises:
        ValueError: If `pattern`, `stride`, `summary` and `factors` define no pattern,
            or need more heads; if shapes do not agree, for a `state` of another pattern
            or without `causal`, or if a requested kernel cannot run.
        TypeError: If `value` is not of a floating-point dtype.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 1024, 4, 32))
    >>> ops.sparse_attention(x, x, x, stride=32, causal=True).shape
    (1, 1024, 4, 32)

    Reference:
        - [Child et al., 2019](https://arxiv.org/abs/1904.10509)
    """
    inputs = query, key, value, key_mask
    call = SoftmaxCall.checked(
        inputs, causal, scale, state, dropout, implementation, tuple(KERNELS)
    )
    config = SparseConfig(pattern, stride, summary, factors, query.shape[2])
    if state is not None:
        room = config.capacity(state["far_key"]) if "far_key" in state else 1
        sizes = (key.shape[0], room, key.shape[-1], value.shape[-1])
        check_state(state, sparse_attention_spec(config, *sizes, None))
    return call.attend(config, FORMS)


def sparse_attention_state(
    batch_size,
    num_heads,
    key_dim,
    value_dim,
    max_length,
    *,
    pattern: str = "strided",
    stride,
    summary: int = 1,
    factors: str | int = "merged",
    dtype="float32",
):
    """The state of causal sparse attention before the first position.

    The strided pattern's second factor needs every key again, `stride` positions
    later: its cache holds all keys, and a token reads `max_length / stride` of them.
    The fixed pattern stores summaries only.

    Args:
        batch_size, num_heads, key_dim, value_dim: Sizes.
        max_length: Capacity of the second factor's cache in positions, rounded up to
            whole blocks; outputs beyond it are NaN.
        pattern, stride, summary, factors: As for `sparse_attention`.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of `"position"` `(batch,)`, the number of positions read; for the first
        factor the recent `"key"`, `"value"` and `"mask"`; for the second
        `"far_key"`, `"far_value"` and `"far_mask"`. Batch first.

    Raises:
        ValueError: For arguments that define no pattern.
    """
    config = SparseConfig(pattern, stride, summary, factors, num_heads)
    sizes = (batch_size, max_length, key_dim, value_dim)
    return make_state(sparse_attention_spec(config, *sizes, dtype))


def sparse_attention_spec(config, batch_size, max_length, key_dim, value_dim, dtype):
    """Names, shapes and dtypes of `sparse_attention_state` for a `SparseConfig`."""
    check_positive_int("max_length", max_length)
    near, far = config.near_heads, config.far_heads
    reach = config.masks(causal=True)[0].reach
    spec = recent_keys_spec(batch_size, reach, near, key_dim, value_dim, dtype)
    if not near:
        spec = {"position": spec["position"]}
    if far:
        blocks = -(-max_length // config.stride)
        strided = config.pattern == "strided"
        rows = (batch_size, blocks * (config.stride if strided else config.summary))
        spec["far_key"] = ((*rows, far, key_dim), dtype)
        spec["far_value"] = ((*rows, far, value_dim), dtype)
        spec["far_mask"] = (rows if strided else (*rows, far), dtype)
    return spec


def sparse_pattern(
    length,
    pattern: str = "strided",
    *,
    stride,
    summary: int = 1,
    factors: str | int = "merged",
    num_heads: int | None = None,
    causal: bool = True,
):
    """The mask of `sparse_attention`, for plots and tests.

    Args:
        length: Number of positions.
        pattern, stride, summary, factors: As for `sparse_attention`.
        num_heads: Number of heads. Defaults to 1, and 2 for `factors="split"`.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `True`.

    Returns:
        Boolean NumPy array `(num_heads, length, length)`: rows are queries.

    Raises:
        ValueError: For arguments that define no pattern.

    Example:

    >>> from keras_efficient_attn.ops import sparse_pattern
    >>> sparse_pattern(6, "fixed", stride=3)[0].astype(int)
    array([[1, 0, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0, 0],
           [0, 0, 1, 1, 1, 0],
           [0, 0, 1, 1, 1, 1]])
    """
    if num_heads is None:
        num_heads = 2 if factors == "split" else 1
    config = SparseConfig(pattern, stride, summary, factors, num_heads)
    return visible_keys(config, length, causal)
