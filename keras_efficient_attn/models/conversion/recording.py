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
        args, kwargs: As `layer.call` was called.
        arguments: Dict of them by the names that `layer.call` has.
        output: What the layer returned.
    """

    args: tuple
    kwargs: dict
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
        run(model, inputs, training=False)
    return calls


def run(function, *args, **kwargs):
    """Calls a model or layer without gradients."""
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "torch":
            import torch

            stack.enter_context(torch.no_grad())
        return function(*args, **kwargs)


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
    masks = [
        call.arguments.get(name) for name in ("query_mask", "key_mask", "value_mask")
    ]
    dense = call.arguments.get("attention_mask")
    if dense is not None:
        # `(batch, heads, T, S)` and `(T, S)`, of which one row a text is left.
        dense = dense[:, 0] if len(dense.shape) == 4 else dense
        dense = dense[None] if len(dense.shape) == 2 else dense
        dense = dense if dense.shape[-2] == 1 else place.stand_in.mask_of_keys(dense)
        masks.append(dense[:, 0])
    masks = [ops.convert_to_numpy(m).astype(bool) for m in masks if m is not None]
    if not masks:
        return None
    query, *_ = call.arguments.values()
    return np.broadcast_to(np.logical_and.reduce(masks), query.shape[:2])


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
        arguments |= arguments.pop("kwargs", {})
        found.append(Call(args, kwargs, arguments, output))
        return output

    return recorded


def _array(output):
    output = output[0] if isinstance(output, tuple) else output
    return ops.convert_to_numpy(ops.cast(output, "float32")).astype("float64")
