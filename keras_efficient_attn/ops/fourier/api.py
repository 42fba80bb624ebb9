"""Fourier attention: the kernel of FourierFormer, its estimators and its features."""

import itertools

from keras import ops

from keras_efficient_attn.ops.common.checks import (
    check_float_dtype,
    check_heads,
    check_positive_values,
)
from keras_efficient_attn.ops.common.inputs import boolean_mask
from keras_efficient_attn.ops.common.online_softmax import divide
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.fourier import reference
from keras_efficient_attn.ops.fourier.kernel import FourierConfig
from keras_efficient_attn.ops.fourier.tiled import fourier_sums

# Causal attention splits the queries into at most this many parts, each with the keys
# up to its end, and each with at least this many queries.
CAUSAL_PARTS = 4
LEAST_PART = 128


@symbolic
def fourier_attention(
    query,
    key,
    value,
    radius,
    *,
    power: int = 4,
    key_mask=None,
    causal: bool = False,
    first_position=0,
    chunk_size: int | None = None,
    implementation: str | None = None,
):
    """Attention whose weights are a product of even powers of sin(z)/z.

    ```
    w[t, s]   = Π_d (sin z_d / z_d)^power,   z = radius ∘ (query[t] − key[s])
    output[t] = Σ_s w[t, s] value[s] / Σ_s w[t, s]
    ```

    over the keys that `key_mask` keeps and, when `causal`, `s <= t + first_position`.
    Time grows with the square of the length, memory linearly: weights exist for a tile
    of queries at a time, as logarithms relative to the largest of their row, and the
    backward pass recomputes them. A query that sees no key gets zeros.

    Args:
        query: `(batch, query_length, heads, head_dim)`.
        key: `(batch, key_length, heads, head_dim)`.
        value: `(batch, key_length, heads, value_dim)`.
        radius: Positive number, or tensor that broadcasts to `(heads, head_dim)`: a
            larger radius makes a narrower kernel.
        power: 2, 4, 6 or 8. Defaults to 4.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            Other keys are never read: they may be NaN.
        causal: Whether query `t` sees keys `0..t + first_position` only. Defaults to
            `False`.
        first_position: Index among the keys of the first query's own key, if `causal`:
            an integer, or integers `(batch,)`. Defaults to 0.
        chunk_size: Minimum number of queries per tile; changes speed and memory, and
            the result only by rounding. Defaults to the device's plan: 4 on a CPU.
        implementation: `"tiled"` (the default); `"fused"`, on PyTorch the same compiled
            by `torch.compile`, which needs up to half a minute at the first call and a
            C++ compiler (Triton on GPUs); on JAX and TensorFlow the same as `"tiled"`,
            compiled by XLA; or `"reference"`, the definition, which forms all pairs
            with all dimensions.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`.

    Raises:
        ValueError: If shapes do not agree, or an argument is not one of those above.
        TypeError: If `value` is not of a floating-point dtype.

    Example:

    >>> import keras
    >>> from keras_efficient_attn.ops import fourier
    >>> x = keras.random.normal((1, 1000, 4, 32))
    >>> fourier.fourier_attention(x, x, x, radius=0.4, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Nguyen et al., 2022](https://arxiv.org/abs/2206.00206)
    """
    key_mask = boolean_mask(key_mask)
    check_heads(query, key, value, key_mask)
    check_float_dtype("value", value)
    check_positive_values("radius", radius)
    config = FourierConfig(power, causal, chunk_size, implementation)
    if implementation == "reference":
        output = reference.fourier_attention(
            query, key, value, radius, power, key_mask, causal, first_position
        )
        return ops.cast(output, value.dtype)

    def attend(query, key, value, key_mask, first_position):
        values, totals, _ = fourier_sums(
            (query, key, value), radius, config, key_mask, first_position
        )
        return ops.cast(divide(values, totals), value.dtype)

    parts = _parts(query, key, first_position) if causal else []
    if not parts:
        return attend(query, key, value, key_mask, first_position)
    return ops.concatenate(
        [
            attend(
                query[:, start:stop],
                key[:, :seen],
                value[:, :seen],
                None if key_mask is None else key_mask[:, :seen],
                first_position + start,
            )
            for start, stop, seen in parts
        ],
        axis=1,
    )


def _parts(query, key, first_position):
    """`(first query, last, last key)` of each part, the ends exclusive; empty for one.

    Each part skips the keys that none of its causal queries sees.
    """
    length, keys = query.shape[1], key.shape[1]
    if not all(isinstance(n, int) for n in (length, keys, first_position)):
        return []
    count = min(CAUSAL_PARTS, length // LEAST_PART)
    ends = [length * part // count for part in range(count + 1)] if count > 1 else []
    return [
        (start, stop, min(keys, stop + first_position))
        for start, stop in itertools.pairwise(ends)
    ]
