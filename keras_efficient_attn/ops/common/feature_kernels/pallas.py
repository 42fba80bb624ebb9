"""Causal linear attention in kernels for TPUs, written in Pallas.

By the compiler's estimate for a TPU v5e, training of a whole layer takes with these
kernels, by their schedules, and in chunks (causal, 16,384 positions, 4 heads of 64,
bfloat16, 2026-11-28) 1.2 and 1.8 ms with elu, 2.2 and 4.8 ms with FAVOR+:

    python -m tools.compile_for_tpu --lengths 16384 --heads 4 --head-dim 64 \\
        --layers linear linear:chunk_size=256 performer performer:chunk_size=256 \\
        --dtype mixed_bfloat16 --mode train --causal

Without causality they lost against XLA's products. On other
devices Pallas interprets them: the same results, slowly, for tests.
"""

import jax
import jax.numpy as jnp

from keras_efficient_attn.ops.common.feature_kernels.choice import given_features
from keras_efficient_attn.ops.common.feature_kernels.pallas_blocks import (
    LANES,
    STATE_NAMES,
    Plan,
    from_row,
)
from keras_efficient_attn.ops.common.feature_kernels.pallas_causal import causal
from keras_efficient_attn.ops.common.online_softmax import (
    bounded_log_weight,
    finish,
)
from keras_efficient_attn.ops.common.pallas_grid import to_row

# Size of a score matrix, half of which belongs to later keys.
CHUNK = 128
# Positions per program: more positions mean fewer program starts.
BLOCK = 1024
# Bytes of a program's inputs and outputs, held for two programs at a time.
BLOCK_BYTES = 2**22


def linear_attention(
    query, key, value, config, map_weights, key_log_weight, key_mask, state
):
    """Causal attention with feature maps, for calls that `choose_kernel` accepts.

    Normalized outputs have the dtype of `value`.
    """
    key_mask = None if key_mask is None else jnp.asarray(key_mask, bool)
    if key_mask is not None and not config.rowwise_maps:
        # Kernels mask their inputs, but here the map reads keys before the kernel.
        key = jnp.where(key_mask[..., None, None], key, 0.0)
    weights = tuple(jnp.asarray(weight, "float32") for weight in map_weights)
    operand = "bfloat16" if value.dtype == jnp.bfloat16 else "float32"
    queries = _Mapped(config, config.query_map, query, weights, operand)
    keys = _Mapped(config, config.key_map, key, weights, operand)

    log_weight = keys.log_scale
    if key_log_weight is not None:
        given = jnp.asarray(key_log_weight, "float32")
        log_weight = given if log_weight is None else given + log_weight
    inputs = {
        "query": queries.tensor,
        "key": keys.tensor,
        "value": jnp.swapaxes(value, 1, 2),
        "weights": keys.weights,
    }
    if log_weight is not None:
        inputs["log_weight"] = to_row(bounded_log_weight(log_weight, key_mask))
    elif key_mask is not None:
        inputs["mask"] = to_row(key_mask)

    weighted = log_weight is not None or keys.is_scaled or state is not None
    output = config.output
    if output == "sum":
        output = "partial" if weighted or queries.is_scaled else "values"
    plan = Plan(
        query_map=queries.map,
        key_map=keys.map,
        output=output,
        weighted=weighted,
        batch=query.shape[0],
        heads=query.shape[2],
        length=query.shape[1],
        features=config.num_features,
        value_dim=value.shape[-1],
        block=_block(key, value, config.num_features),
        chunk=CHUNK,
        operand=operand,
    )
    if state is not None:
        inputs |= _to_matrices(state)
    outputs = causal(plan, inputs)

    values = jnp.swapaxes(outputs["output"], 1, 2)
    new_state = None if state is None else _from_matrices(outputs)
    if output != "partial":
        return (values,), new_state
    totals, scale = from_row(outputs["totals"]), from_row(outputs["scale"])
    if queries.log_scale is not None:
        scale = scale + queries.log_scale
    if config.output == "partial":
        return (values, totals, scale), new_state
    return (finish(values, totals, scale, False),), new_state


class _Mapped:
    """Queries or keys for a kernel, which applies the map if it is row-wise.

    Attributes:
        tensor: Queries or keys, or their features.
        map, weights: The map that the kernel applies, and its weights.
        is_scaled: Whether that map has a log scale.
        log_scale: `(batch, length, heads)`, for features computed here, or `None`.
    """

    def __init__(self, config, function, x, weights, operand):
        self.map, self.weights, self.log_scale = function, weights, None
        row = jax.ShapeDtypeStruct((1, x.shape[-1]), jnp.float32)
        if config.rowwise_maps:
            self.tensor = jnp.swapaxes(x, 1, 2)
            self.is_scaled = jax.eval_shape(function, row, *weights)[1] is not None
            return
        x = jnp.swapaxes(jnp.asarray(x, "float32"), 1, 2)[:, :, None]
        features, log_scale = function(x, *weights)
        self.tensor = features[:, :, 0].astype(operand)
        self.map, self.weights, self.is_scaled = given_features, (), False
        if log_scale is not None:
            log_scale = jnp.broadcast_to(log_scale, features.shape[:-1])
            self.log_scale = jnp.swapaxes(log_scale[:, :, 0], 1, 2)


def _block(x, value, features):
    """Positions per program: as many chunks as fit and are needed."""
    # A vector occupies whole lanes. Features are internal to the program, but count
    # like the other vectors, because the program's memory grows with them.
    widest = LANES * -(-max(x.shape[-1], features) // LANES)
    floats = 3 * (widest + LANES * -(-value.shape[-1] // LANES))
    fitting = BLOCK_BYTES // (2 * floats * max(x.dtype.itemsize, value.dtype.itemsize))
    needed = -(-x.shape[1] // CHUNK)
    most = min(max(1, min(BLOCK, fitting) // CHUNK), needed)
    # Use slightly fewer if no block then extends beyond the length.
    whole = (n for n in range(most, most // 2, -1) if needed % n == 0)
    return CHUNK * next(whole, most)


def _to_matrices(state):
    """A state with one matrix per part and head."""
    sums, normalizer, log_scale = (
        jnp.asarray(state[name], "float32") for name in STATE_NAMES
    )
    parts = sums, normalizer[:, :, None], log_scale[:, :, None, None]
    return dict(zip(STATE_NAMES, parts, strict=True))


def _from_matrices(outputs):
    sums, normalizer, log_scale = (outputs[name] for name in STATE_NAMES)
    parts = sums, normalizer[:, :, 0], log_scale[:, :, 0, 0]
    return dict(zip(STATE_NAMES, parts, strict=True))
