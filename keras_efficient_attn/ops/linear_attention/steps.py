"""The steps of the causal scan, around backend-specific sums."""

from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.scan import vector_jacobian_product
from keras_efficient_attn.ops.linear_attention.keys import mapped_keys


def step_and_gradient(config, masked, by_head, make_chunks):
    """`(step, gradient)` for `recompute_scan`.

    The carry is `(sum, normalizer, log_scale)`; `x` is `(query, key, value)` and the
    further inputs of `mapped_keys`; the constants are the maps' weights. `log_scale`
    has no gradient.

    Args:
        config: `LinearAttentionConfig`.
        masked: Whether `x` includes a key mask.
        by_head: `(tensor, dtype) -> (batch, heads, chunks, chunk_size, ...)`.
        make_chunks: The sums of a group: called with the carry, and the query, key,
            value, log weights of keys and log scales of queries, by head. The result
            has the new `carry`, `outputs(output)`, and `gradient(y, y_gradient,
            carry_gradient, output)` with respect to all arguments.
    """

    def prepare(x, map_weights):
        dtype = accumulator_dtype(*x)
        query, key, value, *rest = (by_head(t, dtype) for t in x)
        query, query_log_scale = config.query_map(query, *map_weights)
        key, log_weight = mapped_keys(config.key_map, key, rest, map_weights, masked)
        return query, key, value, log_weight, query_log_scale

    def step(carry, x, map_weights):
        chunks = make_chunks(carry, *prepare(x, map_weights))
        return chunks.carry, chunks.outputs(config.output)

    def gradient(carry, x, map_weights, y, carry_gradient, y_gradient):
        prepared, pull = vector_jacobian_product(prepare, (x, map_weights))
        chunks = make_chunks(carry, *prepared)
        grad_carry, *grad_prepared = chunks.gradient(
            y, y_gradient, carry_gradient, config.output
        )
        return grad_carry, *pull(grad_prepared)

    return step, gradient
