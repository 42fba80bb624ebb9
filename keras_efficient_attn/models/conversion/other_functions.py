"""The warning of layers that compute another function of the weights than softmax."""

import warnings

import keras
import numpy as np

from keras_efficient_attn.models.conversion.trace import (
    attention_error,
    first_calls,
    layer_names,
)

# What is measured: the length of the row, and the number of layers.
LENGTH, LAYERS = 16, 2


def warn_of_other_functions(model, sites, adapters):
    """Warns of layers that do not estimate softmax, and says how far they are from it.

    Args:
        model: The original, a built model or layer.
        sites: List of `AttentionSite` in it.
        adapters: The built `AttentionAdapter`s in their place, in the same order.
    """
    others = [
        (site, adapter)
        for site, adapter in zip(sites, adapters, strict=True)
        if not (adapter.attention.is_softmax or adapter.attention.estimates_softmax)
        # The layers' own gates are those of the original here.
        and adapter.attention.gate_dense is None
    ]
    if others:
        sites, adapters = zip(*others, strict=True)
        warnings.warn(
            f"{layer_names(adapters)} with these options does not estimate softmax "
            "attention: with the weights of a trained layer, its outputs differ from "
            f"that layer's. {_error_on_random_inputs(model, sites, adapters)} To "
            "measure the error on your data, call `swap_report(original, converted, "
            "inputs)`; to train the copy, call `distill`. `performer` and `vq` "
            "estimate softmax.",
            stacklevel=3,
        )


def _error_on_random_inputs(model, sites, adapters):
    """A sentence with the layers' `attention` errors, or why there are none.

    The original runs on one short row, until all layers that are measured have been
    called: other layers of a large model cost nothing. On JAX, the first eager call in
    a process compiles each operation, which takes seconds.
    """
    measured = sites[:LAYERS]
    try:
        calls = first_calls(
            model, [site.layer for site in measured], random_inputs(model)
        )
        if not all(calls):
            raise ValueError("the model does not call its layers")
        errors = [
            f"{attention_error(*layer):.2%}"
            for layer in zip(measured, adapters, calls, strict=False)
        ]
    # A model of the user's may raise anything; the conversion is not affected.
    except Exception as error:
        reason = " ".join(str(error).split())
        return f"Its error on random tokens could not be measured: {reason}."
    return (
        f"On one row of {LENGTH} random tokens, not on data of the model, the relative "
        f"error (`attention` of `swap_report`) is {', '.join(errors)} (in the first "
        f"{len(errors)} of {len(sites)} such layers)."
    )


def random_inputs(model):
    """One row of random inputs for a functional model, always the same.

    Masks are ones. Integers are below the number of rows of the model's largest
    embedding in inputs named `token_ids`, of its smallest in others. Other inputs are
    normal. Free lengths are `LENGTH`.

    Raises:
        ValueError: If the model's inputs, or its embeddings, are unknown.
    """
    if not isinstance(model, keras.Function):
        raise ValueError(
            f"the inputs of {model.name} are unknown, because it is not a functional "
            "model"
        )
    random = np.random.default_rng(0)
    rows = [
        layer.input_dim
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
    ]

    def draw(tensor):
        batch, *sizes = tensor.shape
        shape = (batch or 1, *(LENGTH if size is None else size for size in sizes))
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "mask" in tensor.name or dtype == "bool":
            return np.ones(shape, dtype)
        if keras.backend.is_int_dtype(dtype):
            if not rows:
                raise ValueError(
                    f"the range of the integers {tensor.name!r} is unknown"
                )
            most = max(rows) if tensor.name.endswith("token_ids") else min(rows)
            return random.integers(most, size=shape).astype(dtype)
        return random.normal(size=shape).astype(dtype)

    return keras.tree.map_structure(draw, model.input)
