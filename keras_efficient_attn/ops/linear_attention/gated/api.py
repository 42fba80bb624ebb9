"""Linear attention with a decay and a correction."""

from keras import ops
from keras.backend import standardize_dtype

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.checks import may_agree
from keras_efficient_attn.ops.common.chunking import fit_length
from keras_efficient_attn.ops.common.feature_kernels.choice import (
    choose_gated_kernel,
)
from keras_efficient_attn.ops.common.inputs import hide_masked
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.plan import device_kind, jit_on_jax
from keras_efficient_attn.ops.linear_attention.gated.chunked import (
    chunked_gated_attention,
)
from keras_efficient_attn.ops.linear_attention.gated.recurrent import (
    recurrent_gated_attention,
)
from keras_efficient_attn.ops.linear_attention.gated.reference import (
    reference_gated_attention,
)

# Lower bound of log decays: differences of −inf would be NaN.
LEAST_LOG_DECAY = -40.0


@jit_on_jax("config")
def gated_attention_with_feature_maps(
    tensors,
    rates,
    config,
    map_weights=(),
    key_mask=None,
    state=None,
    documents=None,
):
    """`linear_attention_with_feature_maps` with `rates`: log decays, and corrections.

    Args:
        tensors: `(query, key, value)`, each `(batch, length, heads, dim)`.
        rates: `(log_decay, beta)`, as for `linear_attention`; each may be `None`.
            Decays of all positions may be `(heads,)`, and get no gradient.
        config: `LinearAttentionConfig`, causal, of maps without log scales.
        map_weights: Tuple of tensors that the feature maps read.
        key_mask, state: As for `linear_attention`.
        documents: The `Documents` of the sequence. Excludes a `state`. Defaults to
            `None`: one in each row.

    Returns:
        `(output, state)`: in the accumulator's dtype, and the state after the last
        position (`None` without `state`).
    """
    query, key, value = map(ops.convert_to_tensor, tensors)
    one_position = state is not None and query.shape[1] == 1
    kernel = None
    if not one_position and (config.implementation or device_kind() != "cpu"):
        kernel = choose_gated_kernel(query, key, value, state, config)
    if kernel == "pallas" and documents is not None:
        kernel = None
    dtype = accumulator_dtype(query, key, value)
    batch, _, heads, value_dim = shape_of(value)
    normalized = config.output == "normalized"
    if normalized:
        # An additional entry 1, which sums up the weights, and is 0 for missing keys.
        value = ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)
    operand = standardize_dtype(value.dtype)
    others = kernel, key_mask, state, documents
    if any(x is not None for x in others):
        rates = at_positions(rates, key)
    tensors, rates = _prepare(query, key, value, key_mask, rates)
    if state is None:
        columns = value_dim + normalized
        carry = ops.zeros((batch, heads, config.num_features, columns), dtype)
    else:
        scale = ops.exp(ops.cast(state["log_scale"], dtype))[..., None, None]
        carry = ops.cast(state["sum"], dtype)
        if normalized:
            normalizer = ops.cast(state["normalizer"], dtype)[..., None]
            carry = ops.concatenate([carry, normalizer], axis=-1)
        carry = carry * scale
    position = None if documents is None else documents.position
    if one_position:
        output, carry = recurrent_gated_attention(
            tensors, rates, carry, map_weights, config
        )
    elif kernel == "fla":
        from keras_efficient_attn.ops.linear_attention.gated import fla_torch

        carry = None if state is None else carry
        rest = map_weights, config, position, operand
        output, carry = fla_torch.fla_gated_attention(tensors, rates, carry, *rest)
    elif kernel == "pallas":
        from keras_efficient_attn.ops.linear_attention.gated import pallas

        output, carry = pallas.gated_attention(
            tensors, rates, carry, map_weights, config, operand
        )
    else:
        output, carry = chunked_gated_attention(
            tensors, rates, carry, map_weights, config, position
        )
    if state is None:
        return output, None
    normalizer = carry[..., -1] if normalized else state["normalizer"]
    return output, {
        "sum": carry[..., :value_dim],
        "normalizer": normalizer,
        "log_scale": ops.zeros_like(state["log_scale"]),
    }


def reference(inputs, rates, normalize):
    """The definition, of `(query_features, key_features, value, key_mask)`."""
    tensors, rates = _prepare(*inputs, rates)
    return reference_gated_attention(tensors, rates, normalize)


def at_positions(rates, key):
    """Rates with a decay for each position of `key`, for `(heads,)` too."""
    log_decay, beta = rates
    if log_decay is not None and len(log_decay.shape) == 1:
        log_decay = ops.broadcast_to(log_decay, shape_of(key)[:3])
    return log_decay, beta


def _prepare(query, key, value, key_mask, rates):
    """Tensors of the query's length, and rates `(batch, length, heads, ...)`.

    Missing keys and their rates are zero, so that they do not change the state.
    """
    dtype = accumulator_dtype(query, key, value)
    rates = [
        ops.expand_dims(x, -1) if x is not None and len(x.shape) == 3 else x
        for x in rates
    ]
    same = query.shape[1] is not None and query.shape[1] == key.shape[1]
    keys = []
    for x in (key, value, *rates):
        if x is not None:
            x = x if key_mask is None else hide_masked(x, key_mask)
            x = ops.cast(x, dtype)
            fits = same or len(x.shape) == 1
            x = x if fits else fit_length(x, shape_of(query)[1])
        keys.append(x)
    key, value, log_decay, beta = keys
    if log_decay is not None:
        bounded = log_decay > LEAST_LOG_DECAY
        log_decay = ops.where(bounded, log_decay, LEAST_LOG_DECAY)
    return (ops.cast(query, dtype), key, value), (log_decay, beta)


def check_rates(log_decay, beta, key_features, causal, key_log_weight):
    """Raises `ValueError` for rates that do not fit the keys or other arguments."""
    shape = tuple(key_features.shape)
    for name, rate in (("log_decay", log_decay), ("beta", beta)):
        if rate is None:
            continue
        fits = may_agree(rate.shape, shape[:3])
        if name == "log_decay":
            fits = fits or may_agree(rate.shape, shape)
        if not fits:
            by_feature = " or by feature" if name == "log_decay" else ""
            raise ValueError(
                f"`{name}` must have the shape (batch, key_length, heads){by_feature} "
                f"of `key_features`. Received: {name}.shape={tuple(rate.shape)}, "
                f"key_features.shape={shape}"
            )
        if not causal:
            raise ValueError(f"`{name}` needs causal=True. Received: causal={causal}")
        if key_log_weight is not None:
            raise ValueError(
                f"`{name}` and `key_log_weight` cannot be used together. Received: both"
            )
