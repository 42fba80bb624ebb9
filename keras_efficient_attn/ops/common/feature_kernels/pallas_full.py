"""Non-causal linear attention in Pallas kernels, forward and backward.

One kernel sums keys and values to the state; another reads the state for each query.
Each has a gradient kernel, which recomputes the features.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from keras_efficient_attn.ops.common.feature_kernels.pallas_blocks import (
    STATE_NAMES,
    SUMS,
    Chunk,
    add_keys,
    add_to,
    along_rows,
    as_columns,
    as_rows,
    call,
    dot,
    given_columns,
    gradients_of,
    keep_state,
    materialize,
    reciprocal,
    shape_of_array,
    start,
    values_of,
    with_gradients,
    with_output_gradients,
)


@with_gradients
def key_state(plan, inputs):
    """The state of all keys.

    Args:
        plan: `Plan` of the keys.
        inputs: As for `pallas_causal.causal`, without queries and state.

    Returns:
        Dict of the parts of the state.
    """
    scratch = plan.scratch()
    return call(plan, linear_attention_keys, inputs, plan.state(), scratch)


def _key_forward(plan, inputs):
    inputs, trained = values_of(inputs)
    state = key_state(plan, inputs)
    return state, (inputs, state["log_scale"], trained)


def _key_backward(plan, residuals, gradients):
    inputs, log_scale, trained = residuals
    given = {**inputs, "log_scale": log_scale}
    given |= {name: materialize(gradients[name]) for name in SUMS}
    outputs = {name: shape_of_array(inputs[name]) for name in ("key", "value")}
    outputs["weights"] = () if trained is None else plan.weights(inputs)
    if "log_weight" in inputs:
        outputs["log_weight"] = plan.row()
    result = call(plan, linear_attention_keys_gradient, given, outputs, {})
    return gradients_of(inputs, result)


key_state.defvjp(_key_forward, _key_backward, symbolic_zeros=True)


@with_gradients
def read_state(plan, inputs):
    """The outputs that queries read from a state.

    Args:
        plan: `Plan` of the queries.
        inputs: Dict of `"query"`, positions; `"weights"`, a tuple; and the parts of
            the state.

    Returns:
        Dict as `pallas_causal.causal`, without a state.
    """
    return call(plan, linear_attention_queries, inputs, plan.outputs(), {})


def _read_forward(plan, inputs):
    inputs, trained = values_of(inputs)
    return read_state(plan, inputs), (inputs, trained)


def _read_backward(plan, residuals, gradients):
    inputs, trained = residuals
    given = with_output_gradients(plan, inputs, gradients)
    outputs = {"query": shape_of_array(inputs["query"]), **plan.state(SUMS)}
    outputs["weights"] = () if trained is None else plan.weights(inputs)
    result = call(plan, linear_attention_queries_gradient, given, outputs, {})
    return gradients_of(inputs, result)


read_state.defvjp(_read_forward, _read_backward, symbolic_zeros=True)


def linear_attention_keys(plan, inputs, outputs, **scratch):
    start(inputs, scratch)
    state = {name: ref[...] for name, ref in scratch.items()}
    given = given_columns(plan, inputs)
    for index in range(plan.chunks):
        chunk = Chunk(plan, inputs, pl.program_id(2), index, given)
        state = add_keys(plan, state, *chunk.key_features(), chunk.value())
    if not plan.weighted:
        state["log_scale"] = jnp.zeros_like(state["log_scale"])
    keep_state(plan, state, scratch, outputs)


def linear_attention_keys_gradient(plan, inputs, outputs):
    start(inputs, {}, outputs["weights"])
    grad_sums, grad_normalizer = (inputs[name][...] for name in SUMS)
    given = given_columns(plan, inputs)
    for index in range(plan.chunks):
        chunk = Chunk(plan, inputs, pl.program_id(2), index, given)
        key, log_weight = chunk.key_features()
        grad_key = dot(plan, chunk.value(), grad_sums, (1, 1)) + grad_normalizer
        grad_log_weight = None
        if plan.weighted:
            factor = jnp.exp(log_weight - inputs["log_scale"][...])
            grad_log_weight = along_rows(grad_key * key) * factor
            key, grad_key = key * factor, grad_key * factor
        chunk.write_value_gradient(outputs, dot(plan, key, grad_sums))
        chunk.write_key_gradient(outputs, grad_key, grad_log_weight)


def linear_attention_queries(plan, inputs, outputs):
    sums, normalizer, log_scale = (inputs[name][...] for name in STATE_NAMES)
    given = given_columns(plan, inputs)
    for index in range(plan.chunks):
        chunk = Chunk(plan, inputs, pl.program_id(2), index, given)
        query, scale = chunk.query_features()
        values = dot(plan, query, sums)
        totals = along_rows(query * normalizer)
        if plan.output == "normalized":
            values = values * reciprocal(totals)
        elif plan.output == "partial":
            scale = jnp.zeros_like(totals) if scale is None else scale
            rows = as_rows(totals, scale + log_scale)
            outputs["totals"][:, chunk.rows], outputs["scale"][:, chunk.rows] = rows
        chunk.write(outputs["output"], values)


def linear_attention_queries_gradient(plan, inputs, outputs):
    sums = [outputs[name] for name in SUMS]
    start(inputs, {}, [*sums, *outputs["weights"]])
    given = given_columns(plan, inputs)
    for index in range(plan.chunks):
        chunk = Chunk(plan, inputs, pl.program_id(2), index, given)
        query, _ = chunk.query_features()
        normalizer = inputs["normalizer"][...]
        grad_values = chunk.load("output", chunk.exists)
        grad_totals = grad_scale = None
        if plan.output == "normalized":
            factor = reciprocal(along_rows(query * normalizer))
            grad_values = grad_values * factor
        elif plan.output == "partial":
            rows = chunk.row("grad_totals"), chunk.row("grad_scale")
            grad_totals, grad_scale = as_columns(*rows)
        grad_query = dot(plan, grad_values, inputs["sum"][...], (1, 1))
        if plan.output == "normalized":
            # The product of the output and its gradient, without the output.
            grad_totals = -along_rows(grad_query * query) * factor
        grad_sums = [dot(plan, query, grad_values, (0, 0))]
        if grad_totals is not None:
            grad_query = grad_query + grad_totals * normalizer
            grad_sums += [jnp.sum(query * grad_totals, axis=0, keepdims=True)]
        add_to(sums, grad_sums)
        chunk.write_query_gradient(outputs, grad_query, grad_scale)
