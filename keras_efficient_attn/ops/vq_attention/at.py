"""One query over the keys of a whole sequence, some of which are yet to come."""

from keras import ops

from keras_efficient_attn.ops.common.block_softmax import attend_at, keys_seen
from keras_efficient_attn.ops.common.masks import SlidingWindow
from keras_efficient_attn.ops.common.online_softmax import finish, merge
from keras_efficient_attn.ops.vq_attention.far import attend_far, far_keys
from keras_efficient_attn.ops.vq_attention.window import near_keys


def attend_to_earlier(query, keys, codebook, config, position):
    """A single query, which sees the keys up to its position.

    Args:
        query: `(batch, 1, heads, dim)`.
        keys: `Keys`.
        codebook: `Codebook`.
        config: `VQConfig`, without relative positions.
        position: Position of the query among the keys, an integer or a scalar.

    Returns:
        `(batch, 1, heads, value_dim)`.
    """
    positions = ops.arange(ops.shape(keys.value)[1], dtype="int32")
    distance = ops.cast(position, "int32") - positions
    seen = keys.valid * ops.cast(distance >= (config.window or 0), query.dtype)
    far = far_keys(keys, codebook, config)._replace(valid=seen)
    parts = [attend_far(query, far, codebook, config, causal=False)[0]]
    if config.window is not None:
        near = near_keys(keys, codebook, config)
        rule = SlidingWindow(config.window, True)
        first, seen = keys_seen(position, rule, *near[:3])
        parts.append(attend_at(position, query, *seen, rule, first))
    return finish(*merge(parts), normalize=True)
