"""Linear attention: similarity as a dot product of features."""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import (
    check_float_dtype,
    check_heads,
    check_implementation,
    check_streaming,
    may_agree,
)
from keras_efficient_attn.ops.common.chunking import fit_length, pad_length
from keras_efficient_attn.ops.common.feature_kernels.choice import (
    GATED_LIMITS,
    IMPLEMENTATIONS,
    choose_kernel,
    features_config,
)
from keras_efficient_attn.ops.common.feature_kernels.entrywise import Entrywise
from keras_efficient_attn.ops.common.inputs import boolean_mask, hide_masked
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.online_softmax import (
    LOG_ZERO,
    bounded_log_weight,
    finish,
    merge,
)
from keras_efficient_attn.ops.common.plan import jit_on_jax, symbolic
from keras_efficient_attn.ops.common.state import check_state, make_state
from keras_efficient_attn.ops.linear_attention import chunked
from keras_efficient_attn.ops.linear_attention.gated import api as gated
from keras_efficient_attn.ops.linear_attention.recurrent import (
    recurrent_linear_attention,
)
from keras_efficient_attn.ops.linear_attention.reference import reference_attention

STATE_NAMES = ("sum", "normalizer", "log_scale")


@symbolic
def linear_attention(
    query_features,
    key_features,
    value,
    *,
    key_log_weight=None,
    key_mask=None,
    causal: bool = False,
    log_decay=None,
    beta=None,
    state=None,
    normalize: bool = True,
    chunk_size: int | None = None,
    implementation: str | None = None,
):
    """Attention whose weights are dot products of features, in linear time.

    ```
    w[t, s]   = exp(key_log_weight[s]) * query_features[t] · key_features[s]
    output[t] = Σ_s w[t, s] value[s] / Σ_s w[t, s]
    ```

    over the keys that `key_mask` keeps and, when `causal`, `s <= t`. Time and memory
    grow linearly with the length; the backward pass recomputes inside chunks.
    A query that sees no key gets zeros.

    With `log_decay` or `beta`, the state decays and is corrected: with `g = log_decay`
    and `k S` the state's value for the key `k`,

    ```
    S'     = diag(exp(g[t])) S[t - 1]
    S[t]   = S' + beta[t] key_features[t]ᵀ (value[t] - key_features[t] S')
    output = query_features[t] S[t]
    ```

    and without `beta`, `S[t] = S' + key_features[t]ᵀ value[t]`. `normalize` divides by
    the output for values of 1. A masked key neither decays the state nor writes.

    Args:
        query_features: `(batch, query_length, heads, features)`.
        key_features: `(batch, key_length, heads, features)`.
        value: `(batch, key_length, heads, value_dim)`.
        key_log_weight: Optional `(batch, key_length, heads)`: log weights of the keys,
            of any size; `-inf` hides a key. Keys are kept relative to a running
            maximum, so that weights like `exp(1000)` do not overflow.
        key_mask: Optional boolean `(batch, key_length)`, `True` for keys to attend.
            Other keys are not read, NaN included.
        causal: Whether query `t` sees keys `0..t` only. Defaults to `False`.
        log_decay: Optional `(batch, key_length, heads)` or, by feature, `(batch,
            key_length, heads, features)`: logarithms, not positive, of the factor by
            which a position multiplies the state before it; below -40 (a factor of
            4e-18), -40. For `causal=True`, without `key_log_weight`.
        beta: Optional `(batch, key_length, heads)`: the share, from 0 to 2, of the
            state's value for the key that the new value replaces (the delta rule); keys
            should have norm 1. Same requirements as `log_decay`.
        state: Optional state from `linear_attention_state` or an earlier call: the
            keys of earlier segments. Needs `causal=True` and equal lengths. A single
            position then costs one pass over the state.
        normalize: Whether to divide by the sum of the weights. Defaults to `True`.
        chunk_size: Positions per chunk; changes the speed, and the result only by
            rounding. Defaults to the device's plan: 64 on a CPU.
        implementation: `"chunked"`, for every backend and device; `"pallas"`, a kernel
            for TPUs, with JAX; `"triton"`, kernels for NVIDIA GPUs of compute
            capability 8 or more, with PyTorch; `"fla"`, the kernels of the package
            flash-linear-attention, if installed; or `"reference"`, the quadratic
            definition, without `state`. Defaults to `None`: `"pallas"` on a TPU, or on
            several under a `keras.distribution`, and `"triton"` on a GPU with PyTorch,
            if they can run; otherwise chunks.

            Kernels are causal and support float32 and bfloat16, and float16 on GPUs;
            static sizes, heads of at most 512 and at most 1,024 features. They choose
            their own chunks: with `chunk_size` none runs. They multiply bfloat16 values
            in bfloat16 and accumulate in float32. They have first reverse-mode
            derivatives only. On other devices `"pallas"` is interpreted (slow, for
            tests), as is `"triton"` with `TRITON_INTERPRET=1` in the environment.
            `"fla"` supports no `key_log_weight` and at most 256 features, and rounds
            states to the dtype of `value`. A single position with a state uses no
            kernel.

            With `log_decay` or `beta`, `"pallas"` supports heads and features of at
            most 256, and there is no `"triton"`. `"fla"` is the default on a GPU with
            PyTorch where the package is installed, for bfloat16 and float16 values,
            `normalize=False` and sizes of heads that are multiples of 16, outside of
            `torch.compile`.

    Returns:
        `(batch, query_length, heads, value_dim)` in the dtype of `value`; with a
        `state`, the pair of that and the state after the last position.

    Raises:
        ValueError: If shapes do not agree, or `state` comes without `causal`, with
            lengths that differ, or with the reference; or if a requested kernel cannot
            run.
        TypeError: If `value` is not of a floating-point dtype.

    Example:

    >>> import keras
    >>> from keras_efficient_attn import ops
    >>> x = keras.random.normal((1, 1000, 4, 32))
    >>> features = keras.ops.elu(x) + 1
    >>> ops.linear_attention(features, features, x, causal=True).shape
    (1, 1000, 4, 32)

    Reference:
        - [Katharopoulos et al., 2020](https://arxiv.org/abs/2006.16236)
    """
    key_mask = boolean_mask(key_mask)
    inputs = query_features, key_features, value, key_mask
    check_heads(*inputs, names=("query_features", "key_features"))
    if key_log_weight is not None:
        key_log_weight = ops.convert_to_tensor(key_log_weight)
    check_key_log_weight(key_log_weight, key_features)
    check_float_dtype("value", value)
    check_implementation(implementation, *IMPLEMENTATIONS, state=state)
    check_streaming(query_features, key_features, causal, state)
    rates = log_decay, beta
    is_gated = any(rate is not None for rate in rates)
    if is_gated:
        gated.check_rates(*rates, key_features, causal, key_log_weight)
        check_implementation(implementation, "chunked", *GATED_LIMITS)
    if implementation == "reference":
        if is_gated:
            output = gated.reference(inputs, rates, normalize)
        else:
            output = reference_attention(inputs, key_log_weight, causal, normalize)
        return ops.cast(output, value.dtype)
    options = dict(causal=causal, normalize=normalize, chunk_size=chunk_size)
    config = dataclasses.replace(
        features_config(key_features.shape[-1], **options),
        implementation=implementation,
        entrywise=_identity,
    )
    if state is not None:
        sizes = (key_features.shape[0], *key_features.shape[2:], value.shape[-1])
        check_state(state, linear_attention_state_spec(*sizes))
    tensors = query_features, key_features, value
    options = dict(key_mask=key_mask, state=state)
    if is_gated:
        output, new_state = gated.gated_attention_with_feature_maps(
            tensors, rates, config, **options
        )
    else:
        (output,), new_state = linear_attention_with_feature_maps(
            tensors, config, key_log_weight=key_log_weight, **options
        )
    output = ops.cast(output, value.dtype)
    return output if state is None else (output, new_state)


@jit_on_jax("config")
def linear_attention_with_feature_maps(
    tensors,
    config,
    map_weights=(),
    key_log_weight=None,
    key_mask=None,
    state=None,
    documents=None,
):
    """`linear_attention` that computes features chunk by chunk, forward and backward.

    Features are often many times larger than queries and keys; here they exist for one
    group of chunks at a time.

    Args:
        tensors: `(query, key, value)`, each `(batch, length, heads, dim)`.
        config: `LinearAttentionConfig`.
        map_weights: Tuple of tensors that the feature maps read.
        key_log_weight, key_mask, state: As `linear_attention`.
        documents: The `Documents` of queries and keys, which are equally long.
            Excludes a `state`, and kernels. Defaults to `None`: one in each row.

    Returns:
        `(outputs, state)`: a tuple of tensors in the accumulator's dtype, and the
        state after the last position (`None` without `state`). A kernel returns
        normalized outputs in the dtype of `value`.
    """
    query, key, value = map(ops.convert_to_tensor, tensors)
    one_position = config.causal and query.shape[1] == key.shape[1] == 1
    is_decoding = one_position and state is not None
    if not is_decoding and documents is None:
        kernel = choose_kernel(query, key, value, state, config)
        if kernel is not None:
            if query.shape[1] != key.shape[1]:
                key, value, key_mask, key_log_weight = _as_long_as(
                    query, key, value, key_mask, key_log_weight
                )
            rest = map_weights, key_log_weight, key_mask, state
            return kernel.linear_attention(query, key, value, config, *rest)
    dtype = accumulator_dtype(query, key, value)
    valid = None
    if key_mask is not None:
        key, value = hide_masked(key, key_mask), hide_masked(value, key_mask)
        valid = ops.cast(key_mask, dtype)
    if key_log_weight is not None:
        key_log_weight = bounded_log_weight(ops.cast(key_log_weight, dtype), key_mask)

    attend = chunked.full_linear_attention
    if state is not None:
        carry = tuple(ops.cast(state[name], dtype) for name in STATE_NAMES)
    else:
        batch, heads = shape_of(query)[0], query.shape[2]
        carry = (
            ops.zeros((batch, heads, config.num_features, shape_of(value)[-1]), dtype),
            ops.zeros((batch, heads, config.num_features), dtype),
            ops.full((batch, heads), LOG_ZERO, dtype),
        )
    if documents is not None:
        keys = key, value, valid, key_log_weight
        outputs = _attend_by_document(
            query, keys, carry, tuple(map_weights), config, documents
        )
        return outputs, None
    if is_decoding:
        attend = recurrent_linear_attention
    else:
        if state is not None and key_log_weight is None:
            # The state may have another scale than unweighted keys.
            key_log_weight = ops.zeros(shape_of(key)[:3], dtype)
        if config.causal:
            attend = chunked.causal_linear_attention
            if query.shape[1] is None or query.shape[1] != key.shape[1]:
                key, value, valid, key_log_weight = _as_long_as(
                    query, key, value, valid, key_log_weight
                )
    tensors = query, key, value, valid, key_log_weight
    outputs, carry = attend(tensors, carry, tuple(map_weights), config)
    if state is None:
        return outputs, None
    return outputs, dict(zip(STATE_NAMES, carry, strict=True))


def _attend_by_document(query, keys, carry, map_weights, config, documents):
    """The outputs of `chunked`, of each document by itself.

    Queries that are not causal see the keys up to their own in one pass, and the later
    ones in another, from the end to the beginning.
    """
    causal = chunked.causal_linear_attention
    if config.causal:
        tensors = query, *keys
        position = documents.position
        return causal(tensors, carry, map_weights, config, position)[0]
    part_config = dataclasses.replace(config, causal=True, output="partial")
    tensors = query, *keys
    before, _ = causal(tensors, carry, map_weights, part_config, documents.position)
    # Without the query's own key.
    later = ops.flip(documents.later, axis=1) - 1
    later_keys = (
        x if x is None else pad_length(ops.flip(x, axis=1), 1, 0)[:, :-1] for x in keys
    )
    tensors = ops.flip(query, axis=1), *later_keys
    after, _ = causal(tensors, carry, map_weights, part_config, later)
    after = tuple(ops.flip(x, axis=1) for x in after)
    parts = merge([before, after])
    if config.output == "partial":
        return parts
    return (finish(*parts, config.output == "normalized"),)


def linear_attention_state(
    batch_size, num_heads, num_features, value_dim, dtype="float32"
):
    """The state of causal linear attention before the first position.

    Args:
        batch_size, num_heads, num_features, value_dim: Sizes.
        dtype: `"float32"` (the default) or `"float64"`.

    Returns:
        Dict of `"sum"` `(batch, heads, features, value_dim)`, `"normalizer"`
        `(batch, heads, features)` and `"log_scale"` `(batch, heads)`: the true sums are
        the stored sums times `exp(log_scale)`.
    """
    spec = linear_attention_state_spec(
        batch_size, num_heads, num_features, value_dim, dtype
    )
    return make_state(spec)


def linear_attention_state_spec(
    batch_size, num_heads, num_features, value_dim, dtype="float32"
):
    """The specification of `linear_attention_state`, for `make_state`."""
    heads = (batch_size, num_heads)
    return {
        "sum": ((*heads, num_features, value_dim), dtype),
        "normalizer": ((*heads, num_features), dtype),
        "log_scale": (heads, dtype, LOG_ZERO),
    }


def check_key_log_weight(key_log_weight, key_features):
    """Raises `ValueError` unless it is `None` or has one weight per key and head."""
    if key_log_weight is None:
        return
    if not may_agree(key_log_weight.shape, key_features.shape[:3]):
        raise ValueError(
            "`key_log_weight` must have the shape (batch, key_length, heads) of "
            "`key_features`. Received: "
            f"key_log_weight.shape={tuple(key_log_weight.shape)}, "
            f"key_features.shape={tuple(key_features.shape)}"
        )


def _identity(features):
    """The entrywise map for precomputed features."""
    return Entrywise("identity")


def _as_long_as(query, key, value, valid, key_log_weight):
    """Keys cut or padded with zeros (that are not valid) to the query's length."""
    if valid is None:
        valid = ops.ones(shape_of(key)[:2], accumulator_dtype(query, key, value))
    length = shape_of(query)[1]
    keys = (key, value, valid, key_log_weight)
    return tuple(None if x is None else fit_length(x, length) for x in keys)
