"""Softmax attention of one query to a few keys, for generation."""

from keras import ops

from keras_efficient_attn.ops.common.numerics import max_along, where
from keras_efficient_attn.ops.common.online_softmax import LOG_ZERO
from keras_efficient_attn.ops.common.random import drop
from keras_efficient_attn.ops.common.state import append_segment, drop_oldest


def attend_single(query, key, value, allowed, dropout=None, logits=None):
    """One query's softmax over its keys.

    Args:
        query: `(batch, 1, heads, dim)`, scaled.
        key: `(batch, keys, heads, dim)`.
        value: `(batch, keys, heads, value_dim)`, zero where not valid.
        allowed: Boolean, broadcasts to `(batch, heads, 1, keys)`.
        dropout: `(rate, seed)` or `None`.
        logits: Optional logits that are added to the products, broadcast alike.

    Returns:
        `(batch, 1, heads, value_dim)`; zero for a query that sees no key.
    """
    products = ops.einsum("bqhd,bkhd->bhqk", query, key)
    if logits is not None:
        products = products + logits
    products = where(allowed, products, LOG_ZERO)
    # Without visible keys, all weights are 0 = exp(LOG_ZERO / 2).
    largest = max_along(
        ops.stop_gradient(products), axis=-1, keepdims=True, initial=LOG_ZERO / 2
    )
    weights = ops.exp(products - largest)
    # At least 1 otherwise: the largest weight is 1.
    totals = ops.sum(weights, axis=-1, keepdims=True)
    weights = weights / ops.where(totals == 0.0, 1.0, totals)
    if dropout is not None:
        rate, seed = dropout
        weights = drop(weights, rate, 0, seed)
    return ops.einsum("bhqk,bkhv->bqhv", weights, value)


def attend_recent_single(inputs, state, mask_fn, dropout=None, bias=None, lengths=None):
    """One position's attention to the keys of a state and to its own.

    Args:
        inputs: `(query, key, value, valid)` of one position, from `masked_inputs`; the
            query is scaled.
        state: As in `recent_keys_spec`, with `mask_fn.reach` keys.
        mask_fn: A causal mask function over one axis.
        dropout: `(rate, seed)` or `None`.
        bias: Optional `(mask_fn.reach + 1, heads)`, added to the logits of the keys,
            the oldest first.
        lengths: As for `keep_last`.

    Returns:
        `(batch, 1, heads, value_dim)`, and the new state.
    """
    query, *segment = inputs
    key, value, valid = past = append_segment(state, *segment)
    allowed = seen_recent(valid, state["position"], mask_fn)
    logits = None if bias is None else ops.transpose(bias)[:, None]
    output = attend_single(query, key, value, allowed[:, None, None], dropout, logits)
    return output, drop_oldest(past, 1, state["position"], lengths)


def seen_recent(valid, position, mask_fn):
    """Mask of the last `reach + 1` keys for the last position, `(batch, keys)`."""
    allowed = valid > 0
    if mask_fn.sees_all_in_reach:
        return allowed
    steps = ops.arange(mask_fn.reach + 1, dtype="int32") - mask_fn.reach
    query_position = position[:, None]
    return ops.logical_and(allowed, mask_fn(query_position, query_position + steps))
