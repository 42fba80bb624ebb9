"""Softmax attention with relative positions, as in Transformer-XL."""

from keras import ops

from keras_efficient_attn.ops.common.checks import may_agree
from keras_efficient_attn.ops.common.inputs import SoftmaxCall
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.relative_attention.reference import reference_attention
from keras_efficient_attn.ops.relative_attention.tiles import (
    RelativeConfig,
    attend_in_tiles,
    attend_last,
)


@symbolic
def relative_attention(
    query,
    key,
    value,
    position_key,
    *,
    content_bias=None,
    position_bias=None,
    offset: int = 0,
    window: int | None = None,
    causal: bool = False,
    key_mask=None,
    documents=None,
    scale: float | None = None,
    dropout=None,
    implementation: str | None = None,
):
    """Softmax attention with content and position terms.

    ```
    w[t, s] = exp(scale · ((q[t] + u)·k[s] + (q[t] + v)·p[offset + t − s]))
    output[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    over the keys `s` that `key_mask` keeps. The matrix of weights exists for a few
    queries at a time and is recomputed for gradients: time is proportional to
    `query_length · key_length`, memory to the lengths. A query that sees no key gets
    zeros.

    For a recurrence over segments, put the keys of earlier segments (the memory) before
    the segment's own, and set `offset` to their number.

    Args:
        query: `(batch, query_length, heads, dim)`.
        key: `(batch, key_length, heads, dim)`.
        value: `(batch, key_length, heads, value_dim)`.
        position_key: `(distances, heads, dim)`: the p of distances that decrease by
            one, from `offset + query_length - 1` to 0 if `causal`, otherwise to
            `offset - key_length + 1`.
        content_bias: Optional u, `(heads, dim)`.
        position_bias: Optional v, `(heads, dim)`.
        offset: Position of the first query, where the first key has position 0: an
            integer from 0 to `key_length`. Defaults to 0.
        window: Optional positive integer: only distances below it, on both sides, are
            visible. Defaults to `None`: all distances.
        causal: Whether a query sees its own position and earlier ones only. Defaults
            to `False`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            Other keys are not read, NaN included.
        documents: Optional pair of numbers `(batch, query_length)` and `(batch,
            key_length)`: queries see the keys with the same number.
        scale: Factor of the products. Defaults to `1 / √dim`.
        dropout: Optional `(rate, seed)` of dropout on the normalised weights, with
            floats `(2,)` from `ops.common.random.dropout_seed`.
        implementation: `"blocks"` (the default) or `"reference"`, the formula with a
            vector per pair, without `dropout`.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`.

    Raises:
        ValueError: If `offset` or `window` is out of range, `position_key` does not
            have all distances, a bias is not `(heads, dim)`, or other shapes do not
            agree.
        TypeError: If `value` is not of a floating-point dtype.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 100, 4, 32))
    >>> distances = keras.random.normal((100, 4, 32))
    >>> ops.relative_attention(x, x, x, distances, causal=True).shape
    (1, 100, 4, 32)

    Reference:
        - [Dai et al., 2019](https://arxiv.org/abs/1901.02860)
    """
    inputs = query, key, value, key_mask
    call = SoftmaxCall.checked(inputs, causal, scale, None, dropout, implementation)
    config, options = RelativeConfig(offset, window), call.options
    biases = content_bias, position_bias
    _check_operands(query, key, position_key, biases, documents, config, options)
    operands = call.inputs, position_key, biases, documents
    if implementation == "reference":
        output = reference_attention(*operands, config, options)
        return ops.cast(output, value.dtype)
    last = options.causal and query.shape[1] == 1 and key.shape[1] == offset + 1
    attend = attend_last if last else attend_in_tiles
    output = attend(*operands, call.seed, config=config, options=options)
    return ops.cast(output, value.dtype)


def _check_operands(query, key, position_key, biases, documents, config, options):
    """Raises `ValueError` for invalid shapes of this operation's own tensors."""
    length, (keys, *head) = query.shape[1], key.shape[1:]
    head, offset = tuple(head), config.offset
    if keys is not None and offset > keys:
        raise ValueError(
            "`offset` must be at most the number of keys. Received: "
            f"offset={offset}, key.shape={tuple(key.shape)}"
        )
    for name, bias in zip(("content_bias", "position_bias"), biases, strict=True):
        if bias is not None and tuple(bias.shape) != head:
            raise ValueError(
                f"`{name}` must have the shape (heads, dim) = {head}. Received: "
                f"{name}.shape={tuple(bias.shape)}"
            )
    distances = None
    if options.causal and length is not None:
        distances = offset + length
    elif not options.causal and None not in (length, keys):
        # No queries and no keys have no distances.
        distances = max(0, length + keys - 1)
    if not may_agree(position_key.shape, (distances, *head)):
        raise ValueError(
            "`position_key` must have the shape (distances, heads, dim) = "
            f"{(distances, *head)}, from distance `offset + query_length - 1` on. "
            f"Received: position_key.shape={tuple(position_key.shape)}, "
            f"query.shape={tuple(query.shape)}, key.shape={tuple(key.shape)}, "
            f"offset={offset}"
        )
    expected = [tuple(query.shape[:2]), tuple(key.shape[:2])]
    if documents is not None and not all(
        may_agree(numbers.shape, shape)
        for numbers, shape in zip(documents, expected, strict=True)
    ):
        raise ValueError(
            "`documents` must be a pair of numbers of the shapes (batch, query_length) "
            f"and (batch, key_length) = {expected[0]} and {expected[1]}. Received: the "
            f"shapes {[tuple(numbers.shape) for numbers in documents]}"
        )
