"""Choosing the layers to replace: as many as an error allows."""

import contextlib
import inspect
import math
import numbers

from keras_efficient_attn.models.swap.places import attention_places
from keras_efficient_attn.models.swap.recording import (
    recorded_calls,
    relative_error,
    replaced_call,
    valid_rows,
)


def layers_within(budget, original, converted, inputs):
    """The layers that can be replaced within an error, as many as possible.

    Each layer is replaced alone, the others keeping softmax; then the longest list of
    those that do least harm is searched by bisection, whose error together is within
    the budget. Every error is measured, none estimated.

    Args:
        budget: The largest `√(Σ‖new − old‖² / Σ‖old‖²)` of what leaves the last
            block, over positions that are no padding.
        original: A backbone.
        converted: Its copy, all of whose attention layers are replaced.
        inputs: List of batches.

    Returns:
        Sorted indices of attention layers.

    Raises:
        ValueError: If no layer can be replaced.
    """
    old, new = attention_places(original), attention_places(converted)
    before, rows = [], []
    for batch in inputs:
        last = old[-1]
        attention, block = recorded_calls(original, [last.layer, last.parent], batch)
        rows += [valid_rows(last, call) for call in attention]
        before += [call.output for call in block]

    def error(layers):
        after = []
        for batch in inputs:
            after += _last_outputs(converted, old, new, set(layers), batch)
        error = relative_error(before, after, rows)
        return math.inf if math.isnan(error) else error

    alone = [error([index]) for index in range(len(old))]
    order = sorted(range(len(old)), key=alone.__getitem__)
    if alone[order[0]] > budget:
        raise ValueError(
            "No layer can be replaced within the budget: the least error is "
            f"{alone[order[0]]:.3g}, of layer {order[0]}. Received: budget={budget}"
        )
    most, too_many = 1, len(order) + 1
    while too_many - most > 1:
        count = (most + too_many) // 2
        if error(order[:count]) <= budget:
            most = count
        else:
            too_many = count
    return sorted(order[:most])


def check_budget(layers, budget, calibrate):
    """Raises `ValueError` if `budget` and `layers` do not go together."""
    if layers != "auto":
        if budget is not None:
            raise ValueError(
                "`budget` is for layers='auto'. Received: "
                f"layers={layers!r}, budget={budget!r}"
            )
        return
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise ValueError(
            "layers='auto' needs a `budget`, the largest relative error of the last "
            f"block, a positive number. Received: budget={budget!r}"
        )
    if calibrate is None:
        raise ValueError(
            "layers='auto' measures errors on the data in `calibrate`. Received: "
            "calibrate=None"
        )


def _last_outputs(converted, old, new, layers, batch):
    """What leaves the last block, with efficient attention in some layers only."""
    with contextlib.ExitStack() as stack:
        for index, (old_place, place) in enumerate(zip(old, new, strict=True)):
            if index not in layers:
                # The trained attention itself, for the time of a run.
                call = _with_known_arguments(old_place.layer.call)
                stack.enter_context(replaced_call(place.layer, call))
        (block,) = recorded_calls(converted, [new[-1].parent], batch)
    return [call.output for call in block]


def _with_known_arguments(call):
    """A `call` that drops what Keras adds for the signature of another."""
    names = set(inspect.signature(call).parameters)

    def known(*args, **kwargs):
        return call(*args, **{k: v for k, v in kwargs.items() if k in names})

    return known
