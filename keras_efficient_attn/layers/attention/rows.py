"""Moves the positions that exist to the front of their rows, and outputs back."""

import dataclasses

from keras import ops

from keras_efficient_attn.ops.common.backend import shape_of
from keras_efficient_attn.ops.common.chunking import fit_length
from keras_efficient_attn.ops.common.rows import RowOrder


@dataclasses.dataclass(frozen=True)
class MovedRows:
    """Where a call's queries and keys were moved from.

    Attributes:
        query, key: `RowOrder`, or `None` for positions that stayed.
    """

    query: RowOrder | None
    key: RowOrder | None

    def restore(self, output):
        """An output `(batch, query_length, ...)`, at the queries' own positions."""
        return output if self.query is None else self.query.to_places(output)

    def restore_scores(self, scores):
        """Scores `(batch, heads, query_length, key_length)`, likewise."""
        for order, axis in ((self.query, 2), (self.key, 3)):
            if order is not None:
                scores = order.to_places(ops.swapaxes(scores, 1, axis))
                scores = ops.swapaxes(scores, 1, axis)
        return scores


def move_to_front(inputs, call, keeps_places):
    """Removes masked positions: those that exist come first, in their order.

    Queries and keys are of one sequence if the call is causal, or if the query is the
    value or the key. A position that the key mask hides is then hidden as a query too.

    Args:
        inputs: `(query, value, key)`, each `(batch, length, dim)`.
        call: `AttentionCall`, with a mask.
        keeps_places: Whether a masked position keeps its place.

    Returns:
        `(inputs, call, moved)`: the inputs, identical tensors kept identical; the call,
        whose masks are true, then false; and `MovedRows`, or `None` if nothing moved.
    """
    query, value, key = inputs
    query_mask, key_mask = call.query_mask, call.key_mask
    exists = query_mask
    if call.causal or query is key or query is value:
        exists = None if key_mask is None else _fit_mask(key_mask, query)
        if query_mask is None:
            query_mask = exists
        elif exists is not None:
            query_mask = ops.logical_and(query_mask, exists)
    if keeps_places:
        return inputs, dataclasses.replace(call, query_mask=query_mask), None
    key_order = None if key_mask is None else RowOrder.of(key_mask)
    query_order = key_order
    if exists is not key_mask:
        query_order = None if exists is None else RowOrder.of(exists)
    moved = {}

    def move(x, order):
        if order is None or x is None:
            return x
        name = id(x), id(order)
        if name not in moved:
            moved[name] = order.to_front(x)
        return moved[name]

    if query_order is not None and query_mask is exists:
        query_mask = query_order.exists
    else:
        query_mask = move(query_mask, query_order)
    call = dataclasses.replace(
        call,
        query_mask=query_mask,
        key_mask=None if key_order is None else key_order.exists,
    )
    inputs = move(query, query_order), move(value, key_order), move(key, key_order)
    return inputs, call, MovedRows(query_order, key_order)


def _fit_mask(key_mask, query):
    """A mask of keys for queries at the same positions; those without a key exist."""
    length = shape_of(query)[1]
    if key_mask.shape[1] is not None and key_mask.shape[1] == query.shape[1]:
        return key_mask
    hidden = ops.cast(ops.logical_not(key_mask), "int32")
    return fit_length(hidden, length) == 0
