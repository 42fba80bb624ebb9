"""Softmax attention over vector-quantised keys, in linear time."""

from keras import ops

from keras_efficient_attn.ops.common.checks import (
    check_float_dtype,
    check_heads,
    check_implementation,
    check_streaming,
)
from keras_efficient_attn.ops.common.inputs import boolean_mask
from keras_efficient_attn.ops.common.plan import symbolic
from keras_efficient_attn.ops.common.state import check_state, make_state
from keras_efficient_attn.ops.vq_attention import reference
from keras_efficient_attn.ops.vq_attention.codebook import nearest_codes
from keras_efficient_attn.ops.vq_attention.config import (
    Keys,
    Positions,
    VQConfig,
    check_codebook,
    make_codebook,
    state_spec,
)
from keras_efficient_attn.ops.vq_attention.windowed import attend_to_keys_and_codes


@symbolic
def vq_attention(
    query,
    key,
    value,
    codebook,
    *,
    sigma=None,
    log_weights=None,
    order: int = 0,
    rank: int | None = None,
    window: int | None = None,
    quantize_window: bool = False,
    gradient_through_cache: bool = True,
    key_mask=None,
    causal: bool = False,
    position_query=None,
    position_key=None,
    state=None,
    block_length: int | None = None,
    implementation: str | None = None,
):
    """Softmax attention to near keys, and to the codes of far ones, in linear time.

    ```
    w[t, s]   = exp(q[t]·k[s])                     if |t − s| < window
                Σ_c p(c | k[s]) exp(q[t]·code[c])  otherwise
    output[t] = Σ_s w[t, s] v[s] / Σ_s w[t, s]
    ```

    `p(c | k)` is 1 for the nearest code or, with `sigma`, the responsibilities
    `softmax(−‖k − code‖² / 2σ² − dim log σ + log_weight)` of a Gaussian mixture; for σ
    → 0 both agree. Far keys are summarised per code by their number and the mean of
    their values, and all weights have one denominator. A query that sees no key gets
    zeros. The choice of nearest codes has no derivative; without `sigma`, the codes and
    the numbers of their keys have none either.

    With `order=2`, a far key is expanded around its code, and its weight, which stays
    positive, is

    ```
    exp(q[t]·code) (1 + x + x²/2 + y/2)       δ = k[s] − code
    x = Σ_{i < rank} q[t, i] δ[i]             y = Σ_{i ≥ rank} q[t, i]² mean(δ[i]²)
    ```

    where the mean is over the far keys of the same code on the same side of the query.
    The first `rank` coordinates should thus be those in which keys differ most from
    their codes. The cache holds, per code, the sums of the features of `x` times the
    values: `(rank + 1)(rank + 2) / 2` times the size that it has with `order=0`.

    Args:
        query: `(batch, query_length, heads, dim)`, already scaled: no other scale is
            applied.
        key: `(batch, key_length, heads, dim)`.
        value: `(batch, key_length, heads, value_dim)`.
        codebook: `(heads, codes, dim)`.
        sigma: Optional `(heads,)` or `(heads, codes)`, positive: the widths of soft
            codes.
        log_weights: Optional `(heads, codes)`, logarithms of the weights of soft codes
            in their mixture, up to a constant. Defaults to equal weights.
        order: 0 (the default), or 2 to expand far keys around nearest codes.
        rank: With `order=2`, the number of coordinates to expand; of the others only
            the mean square of residuals counts. Defaults to `None`: all coordinates.
        window: A query sees itself and `window - 1` earlier keys exactly and, if not
            causal, as many later ones. Defaults to `None`: codes for all keys.
        quantize_window: Whether keys in the window are also replaced by their codes,
            with straight-through gradients (Transformer-VQ). Defaults to `False`.
        gradient_through_cache: Whether values, with `order=2` keys, and with `sigma`
            keys and codes, get a gradient through the weights beyond the window;
            queries always do. Defaults to `True`.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        position_query: Optional, of the shape of `query`; with `position_key`.
        position_key: Optional `(distances, heads, dim)`: its products with
            `position_query` are added to the logits in the window. Distances are
            `window - 1` down to 0 or, if not causal, to `1 - window`.
        state: Optional state from `vq_attention_state` or an earlier call: the keys
            of earlier segments. Needs `causal=True` and equal lengths.
        block_length: Positions per block; changes the speed, and the result only by
            rounding. Defaults to the device's plan: 128 on a CPU, and up to 256 on
            JAX and TensorFlow with more than 256 codes. With `order=2`, a sequence of
            at most this many positions, or 512, is computed in one block.
        implementation: `"chunked"`, or `"reference"`, the quadratic definition, which
            has no `state` and always `gradient_through_cache`. Defaults to `None`:
            kernels where they can run, otherwise `"chunked"`. Causal attention to at
            most 512 hard codes without `order` and `state` has one for a TPU, or for
            several under a `keras.distribution`; the window without `state` and
            positions, as `local_attention`.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, the pair of that and the state after the last position.

    Raises:
        ValueError: If shapes do not agree, if an argument is invalid, or if an argument
            lacks the one it needs: `window` for `quantize_window` and positions;
            `causal` for `state`; `sigma` for `log_weights`; `order=2`, which excludes
            `sigma` and `quantize_window`, for `rank`.
        TypeError: If `value` is not of a floating-point dtype.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 1000, 4, 32)) * 32**-0.25
    >>> codebook = keras.random.normal((4, 64, 32)) * 32**-0.25
    >>> ops.vq_attention(x, x, x, codebook, window=32, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Lingle, 2023](https://arxiv.org/abs/2309.16354), Transformer-VQ
    """
    key_mask = boolean_mask(key_mask)
    check_heads(query, key, value, key_mask)
    check_float_dtype("value", value)
    check_codebook(query, codebook)
    config = VQConfig(
        soft=sigma is not None,
        order=order,
        rank=rank,
        window=window,
        quantize_window=quantize_window,
        relative_positions=position_query is not None or position_key is not None,
        gradient_through_cache=gradient_through_cache,
        block_length=block_length,
        kernels=implementation is None,
    )
    config.check_key_dim(query.shape[-1])
    positions = None
    if config.relative_positions:
        positions = Positions(position_query, position_key)
        _check_positions(query, positions, window, causal)
    check_implementation(implementation, "chunked", state=state)
    check_streaming(query, key, causal, state)
    if state is not None:
        sizes = (key.shape[0], *codebook.shape, value.shape[-1])
        check_state(state, state_spec(*sizes, config, None))
    codebook = make_codebook(codebook, sigma, log_weights)
    if implementation == "reference":
        if not gradient_through_cache:
            raise ValueError(
                "implementation='reference' needs gradient_through_cache=True. "
                "Received: implementation='reference', gradient_through_cache=False"
            )
        keys = Keys(key, value, key_mask)
        output = reference.vq_attention(
            query, keys, codebook, config, causal, positions
        )
        return ops.cast(output, value.dtype)
    index = None
    if sigma is None:
        index = nearest_codes(key, codebook.codes)
    keys = Keys(key, value, key_mask, index)
    output, new_state = attend_to_keys_and_codes(
        query, keys, codebook, config, causal, positions, state
    )
    output = ops.cast(output, value.dtype)
    return output if state is None else (output, new_state)


def vq_attention_state(
    batch_size,
    num_heads,
    num_codes,
    key_dim,
    value_dim,
    *,
    soft: bool = False,
    order: int = 0,
    rank: int | None = None,
    window: int | None = None,
    dtype="float32",
):
    """The state of causal attention over quantised keys before the first position.

    Args:
        batch_size, num_heads, num_codes, key_dim, value_dim: Sizes.
        soft: Whether the attention has a `sigma`. Defaults to `False`.
        order, rank, window: As for `vq_attention`.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of tensors, batch first: the sums of values and the numbers of keys per
        code, of each feature with `order=2`, and the last `window` keys.

    Raises:
        ValueError: If an option is invalid.
    """
    config = VQConfig(soft=soft, order=order, rank=rank, window=window)
    config.check_key_dim(key_dim)
    sizes = (batch_size, num_heads, num_codes, key_dim, value_dim)
    return make_state(state_spec(*sizes, config, dtype))


def _check_positions(query, positions, window, causal):
    keys = (window if causal else 2 * window - 1, *query.shape[2:])
    expected = (tuple(query.shape), keys)
    received = tuple(None if t is None else tuple(t.shape) for t in positions)
    if received != expected:
        raise ValueError(
            "`position_query` and `position_key` must be given together, with the "
            f"shapes {expected[0]} and {expected[1]}. Received: the shapes "
            f"{list(received)}"
        )
