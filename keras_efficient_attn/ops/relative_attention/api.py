"""Softmax attention with terms for distances, some queries at a time."""

import functools

from keras import ops

from keras_efficient_attn.ops.common.block_softmax import (
    MIN_BLOCK,
    scan_groups,
    softmax_part,
)
from keras_efficient_attn.ops.common.chunking import (
    GROUP_FLOATS,
    chunk_layout,
    pad_length,
    pad_to,
)
from keras_efficient_attn.ops.common.compiled import compiled
from keras_efficient_attn.ops.common.online_softmax import divided
from keras_efficient_attn.ops.common.relative_positions import shifted_by_query


@compiled("offset", "causal", "window", "dropout")
def relative_attention(
    query,
    key,
    value,
    valid,
    position_query,
    position_key,
    *,
    offset,
    causal,
    window,
    documents=None,
    dropout=None,
    dropout_seed=None,
):
    """Softmax attention with a product for each distance beside that for each key.

    ```
    w[i, j] = exp(query[i]·key[j] + position_query[i]·position_key[offset + i − j])
    ```

    The matrix exists for some queries at a time, and again for their gradients.

    Args:
        query, position_query: `(batch, length, heads, dim)`, scaled.
        key, value: `(batch, keys, heads, dim)`, `value` zero where not valid.
        valid: `(batch, keys)`, 1 for keys that exist and 0 for others.
        position_key: `(distances, heads, dim)`, of distances that fall by one from
            `offset + length - 1`: to 0 if causal, to `offset - keys` if not.
        offset: Position of the first query, where the first key has position 0.
        causal: Whether a query sees its own position and earlier ones only.
        window: Only distances below it are seen; `None` for all.
        documents: Optional pair of numbers `(batch, length)` and `(batch, keys)`:
            queries see the keys of equal ones.
        dropout: Rate of dropout on the normalised weights, or `None`.
        dropout_seed: Floats `(2,)`, from `weight_dropout.dropout_seed`.

    Returns:
        `(batch, length, heads, value_dim)`; zero for a query that sees no key.
    """
    length, keys, heads = ops.shape(query)[1], ops.shape(key)[1], query.shape[2]
    dtype = query.dtype
    floats = GROUP_FLOATS // MIN_BLOCK
    if isinstance(keys, int):
        floats = heads * 4 * max(1, keys)
    size, chunks, groups = chunk_layout(length, MIN_BLOCK, query.shape[0], floats)
    size = size * chunks

    # The first query of the last group is the first row's; what no causal query sees
    # has no product.
    after = keys - offset if causal else 0
    position_key = pad_length(position_key[None], groups * size - length, after)[0]
    positions = ops.cast(ops.arange(length, dtype="int32") + offset, dtype)[None]
    xs = [query, position_query, positions]
    consts = [key, value, valid, position_key]
    if documents is not None:
        of_queries, of_keys = (ops.cast(numbers, dtype) for numbers in documents)
        xs.append(of_queries)
        consts.append(of_keys)
    consts[:2] = (ops.swapaxes(t, 1, 2) for t in consts[:2])
    xs = [pad_to(x, groups * size) for x in xs]
    xs.append(ops.cast(ops.arange(groups), dtype)[None])
    if dropout is not None:
        consts.append(ops.cast(dropout_seed, dtype))
    single = isinstance(groups, int) and groups == 1
    step = _step(causal, window, documents is not None, dropout, single)
    (heads,) = scan_groups(step, tuple(xs), tuple(consts), groups)
    return heads[:, :length]


@functools.cache
def _step(causal, window, documents, rate, single):
    def step(carry, x, consts):
        query, position_query, positions, *rest, group = x
        group = group[0, 0]
        key, value, valid, position_key, *others = consts
        query, position_query = (ops.swapaxes(t, 1, 2) for t in (query, position_query))
        size, width = ops.shape(query)[2], ops.shape(key)[2]

        distance = positions[0][:, None] - ops.cast(
            ops.arange(width, dtype="int32"), positions.dtype
        )
        allowed = valid[:, None, None, :] > 0
        if causal:
            allowed = ops.logical_and(allowed, distance >= 0)
        if window is not None:
            allowed = ops.logical_and(allowed, ops.abs(distance) < window)
        if documents:
            same = rest[0][:, None, :, None] == others[0][:, None, None, :]
            allowed = ops.logical_and(allowed, same)

        if not single:
            # The rows of these queries' distances.
            last = ops.shape(position_key)[0] - width - size
            first = last - size * ops.cast(group, "int32")
            rows = first + ops.arange(size + width, dtype="int32")
            position_key = ops.take(position_key, rows, axis=0)
        products = position_query @ ops.transpose(position_key, (1, 2, 0))
        dropout = None if rate is None else (rate, group, others[-1])
        values, totals, _ = softmax_part(
            query, key, value, allowed, dropout, shifted_by_query(products, width)
        )
        return carry, (ops.swapaxes(divided(values, totals), 1, 2),)

    return step
