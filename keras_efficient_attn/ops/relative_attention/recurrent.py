"""Attention with relative positions for the last position only."""

from keras import ops

from keras_efficient_attn.ops.common.compilation import jit_on_jax
from keras_efficient_attn.ops.common.inputs import masked_inputs
from keras_efficient_attn.ops.common.single_query import attend_single
from keras_efficient_attn.ops.relative_attention.tiles import biased_queries


@jit_on_jax("config", "options")
def attend_last(inputs, position_key, biases, documents, seed, config, options):
    """The output of one query that follows all keys except its own.

    Args:
        inputs: `(query, key, value, key_mask)`; the query is `(batch, 1, heads, dim)`,
            and the keys, `(batch, offset + 1, heads, dim)`, are the state's (the
            memory) and its own.
        position_key: `(offset + 1, heads, dim)`, of distances that decrease to 0.
        biases, documents, seed, config, options: As for `attend_in_tiles`.

    Returns:
        `(batch, 1, heads, value_dim)`.
    """
    query, key, value, valid = masked_inputs(*inputs)
    content, position = biased_queries(query, biases, options.scale)
    allowed = (valid > 0)[:, None, None]
    if config.window is not None and config.window <= config.offset:
        distance = ops.arange(config.offset, -1, -1, dtype="int32")
        allowed = ops.logical_and(allowed, distance < config.window)
    if documents is not None:
        same = documents[0] == documents[1]
        allowed = ops.logical_and(allowed, same[:, None, None])
    # In the order of the keys, with decreasing distances.
    position_key = ops.cast(position_key, query.dtype)
    logits = ops.einsum("bqhd,khd->bhqk", position, position_key)
    return attend_single(
        content, key, value, allowed, options.dropout_and_seed(seed), logits
    )
