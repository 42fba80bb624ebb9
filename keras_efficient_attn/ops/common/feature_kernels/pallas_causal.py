"""Causal linear attention in Pallas kernels, forward and backward.

The formulae are those of `linear_attention.chunked`. A program iterates over the
chunks of a head and keeps the state in scratch memory. The backward pass needs no saved
states. One kernel runs forwards again for the gradients of queries, which read the
state before their chunk. Another runs backwards for the gradients of keys and values,
with the gradient of the state after their chunk. Only rows pass between them, a few
numbers per query.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from keras_efficient_attn.ops.common.feature_kernels.pallas_blocks import (
    SUMS,
    Chunk,
    add_keys,
    along_rows,
    as_columns,
    as_rows,
    call,
    dot,
    given_columns,
    gradients_of,
    keep_state,
    lower_triangle,
    mask_or_zero,
    materialize,
    start,
    upper_triangle,
    values_of,
    with_output_gradients,
)
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO, reciprocal


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal(plan, inputs):
    """Causal linear attention.

    Args:
        plan: `Plan`.
        inputs: Dict of `"query"`, `"key"` and `"value"`, positions; `"weights"`, a
            tuple; optionally `"mask"` or `"log_weight"`, rows (`LOG_ZERO` in the latter
            for hidden keys); optionally the parts of the state, the normalizer `(1,
            features)` and the log scale `(1, 1)` for each head.

    Returns:
        Dict of `"output"`; of `"totals"` and `"scale"`, rows, if the plan's output is
        partial; and of the parts of the state after the last position, if the inputs
        have a state.
    """
    outputs = plan.outputs()
    if "sum" in inputs:
        outputs |= plan.state()
    return call(plan, linear_attention_forward, inputs, outputs, plan.scratch())


def _forward(plan, inputs):
    inputs, trained = values_of(inputs)
    return causal(plan, inputs), (inputs, trained)


def _backward(plan, residuals, gradients):
    inputs, trained = residuals
    weights = () if trained is None else plan.weights(inputs)

    given = with_output_gradients(plan, inputs, gradients)
    rows = ("scale", "before") if plan.weighted else ()
    if plan.output == "normalized":
        rows += ("factor", "grad_totals")
    outputs = {"query": inputs["query"], "weights": weights}
    outputs |= {name: plan.row() for name in rows}
    scratch = plan.scratch()
    first = call(plan, linear_attention_query_gradient, given, outputs, scratch)

    unused = "sum", "normalizer", "log_scale", "grad_scale"
    given = {name: x for name, x in given.items() if name not in unused}
    given |= {name: first[name] for name in rows}
    outputs = {name: inputs[name] for name in ("key", "value")}
    outputs["weights"] = weights
    if "sum" in inputs:
        given |= {name: materialize(gradients[name]) for name in SUMS}
        outputs |= plan.state(SUMS)
    if "log_weight" in inputs:
        outputs["log_weight"] = plan.row()
    second = call(
        plan,
        linear_attention_key_gradient,
        given,
        outputs,
        plan.scratch(SUMS),
        backwards=True,
    )
    return gradients_of(inputs, first, second)


causal.defvjp(_forward, _backward, symbolic_zeros=True)


class _Step:
    """The scores of a chunk, and the state after it.

    Attributes:
        key, value: Features of keys, and values.
        query_log_scale: Log scale of query features, a column; `None` for 0.
        scores: Weighted scores, 0 for later keys.
        factors: Factors of the scores; `None` for 1.
        scale: Log scale of a query's sums, a column; `None` for 0.
        far_query: Queries scaled for reading the state before the chunk.
        query_factor: The factor of `far_query`; `None` for 1.
        after: The state after the chunk, by name.
    """

    def __init__(self, plan, chunk, state):
        query, self.query_log_scale = chunk.query_features()
        key, log_weight = chunk.key_features()
        self.key, self.value = key, chunk.value()
        self.scores = dot(plan, query, key, (1, 1))
        self.far_query = query
        self.factors = self.scale = self.query_factor = None
        lower = lower_triangle(plan.chunk)
        if not plan.weighted:
            self.scores = jnp.where(lower, self.scores, 0.0)
        else:
            (row,) = as_rows(log_weight)
            seen = jnp.where(lower, row, LOG_ZERO)
            # The maxima over exactly the state and the keys that each query may see.
            largest = jnp.max(seen, axis=1, keepdims=True)
            self.scale = jnp.maximum(largest, state["log_scale"])
            self.factors = jnp.where(lower, jnp.exp(seen - self.scale), 0.0)
            self.scores = self.scores * self.factors
            self.query_factor = jnp.exp(state["log_scale"] - self.scale)
            self.far_query = query * self.query_factor
        self.after = add_keys(plan, state, key, log_weight, self.value)

    def totals(self, state):
        near = along_rows(self.scores)
        return near + along_rows(self.far_query * state["normalizer"])

    def whole_scale(self):
        """The log scale of values and totals, a column."""
        scales = [x for x in (self.scale, self.query_log_scale) if x is not None]
        return sum(scales) if scales else jnp.zeros((self.key.shape[0], 1))


def linear_attention_forward(plan, inputs, outputs, **scratch):
    start(inputs, scratch)
    state = {name: ref[...] for name, ref in scratch.items()}
    given = given_columns(plan, inputs)
    for index in range(plan.chunks):
        chunk = Chunk(plan, inputs, pl.program_id(2), index, given)
        step = _Step(plan, chunk, state)
        values = dot(plan, step.scores, step.value)
        values += dot(plan, step.far_query, state["sum"])
        if plan.output == "normalized":
            values = values * reciprocal(step.totals(state))
        elif plan.output == "partial":
            totals, scale = as_rows(step.totals(state), step.whole_scale())
            outputs["totals"][:, chunk.rows] = totals
            outputs["scale"][:, chunk.rows] = scale
        chunk.write(outputs["output"], values)
        state = step.after
    keep_state(plan, state, scratch, outputs)


def linear_attention_query_gradient(plan, inputs, outputs, **scratch):
    """Computes the gradients of queries, and rows for the gradient of keys.

    The gradient of the sum of values is the output's gradient times the row `factor`;
    the gradient of the totals is the row `grad_totals`. `scale` is the scale of the
    scores, `before` the log scale of the state before the query's chunk.
    """
    start(inputs, scratch, outputs["weights"])
    state = {name: ref[...] for name, ref in scratch.items()}
    given = given_columns(plan, inputs)
    for index in range(plan.chunks):
        chunk = Chunk(plan, inputs, pl.program_id(2), index, given)
        step = _Step(plan, chunk, state)
        grad_values = chunk.load("output", chunk.exists)
        grad_totals, grad_scale, columns = None, None, {}
        if plan.output == "normalized":
            factor = reciprocal(step.totals(state))
            grad_values = grad_values * factor
            columns["factor"] = factor
        elif plan.output == "partial":
            grad_totals, grad_scale = as_columns(
                chunk.row("grad_totals"), chunk.row("grad_scale")
            )
        grad_scores = dot(plan, grad_values, step.value, (1, 1))
        grad_query = dot(plan, grad_values, state["sum"], (1, 1))
        if plan.output == "normalized":
            # The product of the output and its gradient, without the output.
            along = along_rows(grad_scores * step.scores)
            along += along_rows(grad_query * step.far_query)
            grad_totals = columns["grad_totals"] = -along * factor
        if grad_totals is not None:
            grad_scores = grad_scores + grad_totals
            grad_query = grad_query + grad_totals * state["normalizer"]
        if plan.weighted:
            grad_scores = grad_scores * step.factors
            grad_query = grad_query * step.query_factor
            columns["scale"] = step.scale
            columns["before"] = jnp.broadcast_to(state["log_scale"], step.scale.shape)
        else:
            grad_scores = jnp.where(lower_triangle(plan.chunk), grad_scores, 0.0)
        grad_query = grad_query + dot(plan, grad_scores, step.key)
        chunk.write_query_gradient(outputs, grad_query, grad_scale)
        if columns:
            for name, row in zip(columns, as_rows(*columns.values()), strict=True):
                outputs[name][:, chunk.rows] = row
        state = step.after
    keep_state(plan, state, scratch, outputs)


def linear_attention_key_gradient(plan, inputs, outputs, **scratch):
    """Computes the gradients of keys, values, log weights and state, last block first.

    Scores are transposed, with one row per key, because the numbers per query are rows.
    """
    start(inputs, scratch, outputs["weights"])
    grad_sums, grad_normalizer = (scratch[name][...] for name in SUMS)
    block = plan.blocks - 1 - pl.program_id(2)
    given = given_columns(plan, inputs)
    for index in reversed(range(plan.chunks)):
        chunk = Chunk(plan, inputs, block, index, given)
        query, _ = chunk.query_features()
        key, log_weight = chunk.key_features()
        value, grad_output = chunk.value(), chunk.load("output", chunk.exists)
        factor = chunk.row("factor") if "factor" in inputs else None
        grad_totals = chunk.row("grad_totals") if "grad_totals" in inputs else None
        seen = upper_triangle(plan.chunk)
        far_key, kept = key, None
        scores = dot(plan, key, query, (1, 1))
        if plan.weighted:
            if chunk.exists_row is not None:
                seen = seen & chunk.exists_row
            # A chunk of padding only leaves the maximum at its minimum.
            scale, before = chunk.row("scale"), chunk.first("before", LOG_ZERO)
            after = jnp.maximum(before, jnp.max(log_weight, axis=0, keepdims=True))
            factors = jnp.exp(jnp.where(seen, log_weight - scale, LOG_ZERO))
            factors = jnp.where(seen, factors, 0.0)
            scores = scores * factors
            key_factor, kept = jnp.exp(log_weight - after), jnp.exp(before - after)
            far_key = key * key_factor
            far_factor = mask_or_zero(chunk.exists_row, jnp.exp(before - scale))
        else:
            scores = jnp.where(seen, scores, 0.0)
            far_factor = None

        # Values: within their chunk, and through the state.
        near = scores if factor is None else scores * factor
        grad_value = dot(plan, near, grad_output) + dot(plan, far_key, grad_sums)
        chunk.write_value_gradient(outputs, grad_value)

        # Keys, and their log weights.
        grad_scores = dot(plan, value, grad_output, (1, 1))
        if factor is not None:
            grad_scores = grad_scores * factor
        if grad_totals is not None:
            grad_scores = grad_scores + grad_totals
        grad_key = dot(plan, value, grad_sums, (1, 1)) + grad_normalizer
        grad_log_weight = None
        if plan.weighted:
            grad_log_weight = along_rows(grad_scores * scores)
            grad_log_weight += along_rows(grad_key * far_key)
            grad_scores = grad_scores * factors
            grad_key = grad_key * key_factor
        else:
            grad_scores = jnp.where(seen, grad_scores, 0.0)
        grad_key = grad_key + dot(plan, grad_scores, query)
        chunk.write_key_gradient(outputs, grad_key, grad_log_weight)

        # The state before the chunk.
        if kept is not None:
            grad_sums, grad_normalizer = grad_sums * kept, grad_normalizer * kept
        rows = {}
        if far_factor is not None or factor is not None:
            rows["values"] = _product(far_factor, factor)
        if grad_totals is not None:
            rows["totals"] = _product(far_factor, grad_totals)
        columns = dict(zip(rows, as_columns(*rows.values()), strict=True))
        if "values" in rows:
            grad_output = grad_output * columns["values"]
        grad_sums = grad_sums + dot(plan, query, grad_output, (0, 0))
        if "totals" in rows:
            far = jnp.sum(query * columns["totals"], axis=0, keepdims=True)
            grad_normalizer = grad_normalizer + far
    gradients = dict(zip(SUMS, (grad_sums, grad_normalizer), strict=True))
    keep_state(plan, gradients, scratch, outputs)


def _product(first, second):
    """A product; `None` means 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second
