"""What the layers of a model are called with, and what they return."""

import contextlib
import dataclasses
import inspect

import keras
import numpy as np
from keras import ops


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        arguments: Dict of the arguments of `layer.call` that were given.
        output: What the layer returned.
    """

    arguments: dict
    output: object


def recorded_calls(model, layers, inputs):
    """The calls of layers while a model runs once, without training.

    Args:
        model: A built model.
        layers: List of layers in it.
        inputs: One batch, as the model takes it.

    Returns:
        A list of lists of `Call`, one for each layer.
    """
    calls = [[] for _ in layers]
    with contextlib.ExitStack() as stack:
        for layer, found in zip(layers, calls, strict=True):
            stack.enter_context(replaced_call(layer, _recorder(layer, found)))
        run(model, inputs)
    return calls


def run(model, inputs):
    """Runs a model once, without training and without gradients."""
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "torch":
            import torch

            stack.enter_context(torch.no_grad())
        return model(inputs, training=False)


@contextlib.contextmanager
def replaced_call(layer, call):
    """A layer, with another function for its `call`; may be nested."""
    before = vars(layer).get("call")
    layer.call = call
    try:
        yield
    finally:
        if before is None:
            del layer.call
        else:
            layer.call = before


def valid_rows(place, call):
    """Boolean `(batch, length)` of positions that are no padding, or `None` for all.

    Args:
        place: A `Place`.
        call: A `Call` of its attention layer.
    """
    mask = call.arguments.get("attention_mask")
    if mask is None:
        return None
    if mask.shape[-2] != 1:
        mask = place.stand_in.mask_of_keys(mask)
    return ops.convert_to_numpy(mask)[..., 0, :].astype(bool)


def relative_error(old, new, rows):
    """`√(Σ‖new − old‖² / Σ‖old‖²)` over lists of outputs.

    Args:
        old, new: Lists of outputs `(batch, length, dim)`, or tuples that begin so.
        rows: A list with a mask from `valid_rows` for each.
    """
    difference, norm = 0.0, 0.0
    for first, second, kept in zip(old, new, rows, strict=True):
        first, second = _array(first), _array(second)
        if kept is not None:
            first, second = first[kept], second[kept]
        difference += np.sum(np.square(second - first))
        norm += np.sum(np.square(first))
    return float(np.sqrt(difference / norm)) if norm else 0.0


def _recorder(layer, found):
    call = layer.call
    signature = inspect.signature(call)

    def recorded(*args, **kwargs):
        output = call(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        extra = arguments.pop("kwargs", {})
        found.append(Call(arguments | extra, output))
        return output

    return recorded


def _array(output):
    output = output[0] if isinstance(output, tuple) else output
    return ops.convert_to_numpy(ops.cast(output, "float32")).astype("float64")
