"""Chooses the layers to replace: as many as an error budget allows."""

import inspect
import math
import numbers

import keras

from keras_efficient_attn.models.conversion.trace import (
    enter_all,
    relative_error,
    replace_call,
    trace_layers,
    valid_positions,
)


def select_layers(budget, targets, converted, inputs):
    """The largest set of layers that can be replaced within an error budget.

    First, each layer is replaced alone and its error measured. Then bisection finds the
    longest list of layers, in order of increasing error, whose joint error is within
    the budget. Every error is measured, none estimated.

    Args:
        budget: The largest `√(Σ‖new − old‖² / Σ‖old‖²)` of the output of a stack's last
            block, over positions that are not padding. It applies to each stack
            separately (towers, or an encoder and a decoder).
        targets: `ConversionTargets` with all layers of a backbone.
        converted: A copy with all attention layers replaced.
        inputs: List of batches.

    Returns:
        Sorted indices of attention layers.

    Raises:
        ValueError: If no layer can be replaced.
    """
    error = _block_error(targets, converted, inputs)
    number = len(targets.sites)
    alone = [error([index]) for index in range(number)]
    order = sorted(range(number), key=alone.__getitem__)
    if alone[order[0]] > budget:
        raise ValueError(
            "No layer can be replaced within the budget: raise it to the smallest "
            f"error, {alone[order[0]]:.3g} of layer {order[0]}, or more. Received: "
            f"budget={budget}"
        )
    most, too_many = 1, len(order) + 1
    while too_many - most > 1:
        count = (most + too_many) // 2
        if error(order[:count]) <= budget:
            most = count
        else:
            too_many = count
    return sorted(order[:most])


def _block_error(targets, converted, inputs):
    """The error of what leaves the last blocks, as a function of a list of layers.

    Args:
        targets, converted, inputs: As for `select_layers`. All layers but those of the
            list have their softmax.
    """
    old, new = targets.sites, converted.attention_sites
    ends = [_ends_of_stacks(targets.model, old, batch) for batch in inputs]

    def error(layers):
        stacks = {}
        for batch, before in zip(inputs, ends, strict=True):
            blocks = {index: new[index].block for index, _ in before}
            with _softmax_except(layers, old, new):
                calls = trace_layers(converted, list(blocks.values()), batch)
            after = dict(zip(blocks, calls, strict=True))
            for (index, number), (output, valid) in before.items():
                stack = stacks.setdefault((index, number), [])
                stack.append((output, after[index][number].output, valid))
        errors = [
            relative_error(*zip(*stack, strict=True)) for stack in stacks.values()
        ]
        return math.inf if any(map(math.isnan, errors)) else max(errors)

    return error


def check_budget(layers, budget, calibrate):
    """Raises `ValueError` if `budget` and `layers` do not go together."""
    if not (isinstance(layers, str) and layers == "auto"):
        if budget is not None:
            raise ValueError(
                f"`budget` needs layers='auto'. Received: layers={layers!r}, "
                f"budget={budget!r}"
            )
        return
    # A number of NumPy as well.
    number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    if not number or not 0 < budget < math.inf:
        raise ValueError(
            "layers='auto' needs a `budget`, a positive number: the largest relative "
            "error that the output of the last block may have. Received: "
            f"budget={budget!r}"
        )
    if calibrate is None:
        raise ValueError(
            "layers='auto' needs data in `calibrate`, on which it measures errors. "
            "Received: calibrate=None"
        )


def _ends_of_stacks(model, sites, batch):
    """The outputs of the last block of each stack, and the positions that count.

    A stack ends with a block whose output is not the first input of another block.

    Returns:
        Dict of pairs `(output, valid)`, by the index of the site and the call number of
        its block.
    """
    layers = [site.layer for site in sites] + [site.block for site in sites]
    calls = trace_layers(model, layers, batch)
    attention, blocks = calls[: len(sites)], calls[len(sites) :]
    taken = {id(keras.tree.flatten(call.query)[0]) for made in blocks for call in made}
    return {
        (index, number): (
            call.output,
            valid_positions(sites[index], attention[index][number]),
        )
        for index, made in enumerate(blocks)
        for number, call in enumerate(made)
        if id(_first_output(call)) not in taken
    }


def _first_output(call):
    return keras.tree.flatten(call.output)[0]


def _softmax_except(layers, old, new):
    """Context in which all other layers use the trained attention."""
    return enter_all(
        replace_call(site.layer, _with_known_arguments(old_site.layer.call))
        for index, (old_site, site) in enumerate(zip(old, new, strict=True))
        if index not in layers
    )


def _with_known_arguments(call):
    """A `call` without the arguments that Keras adds for another signature."""
    names = set(inspect.signature(call).parameters)

    def known(*args, **kwargs):
        return call(*args, **{k: v for k, v in kwargs.items() if k in names})

    return known
