"""What replacing softmax attention changes, layer by layer."""

import contextlib
import dataclasses

import numpy as np
from keras import ops

from keras_efficient_attn.swap.places import attention_places
from keras_efficient_attn.swap.stand_ins import StandIn


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The error of one attention layer.

    Errors are `√(Σ‖new − old‖² / Σ‖old‖²)` over positions that are no padding.

    Attributes:
        index: As in the argument `layers` of `convert_backbone`.
        path: Path of the attention layer.
        replaced: Whether it is an efficient layer.
        attention: Error of its output for the inputs that it has in the original: what
            this layer does by itself.
        residual: Error of what leaves its block in the converted model: what all
            layers up to this one do together. `None` where the layer stands in no
            block.
    """

    index: int
    path: str
    replaced: bool
    attention: float
    residual: float | None


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """The errors of all self-attention layers; prints as a table.

    Attributes:
        layers: List of `LayerError`.
    """

    layers: list

    def __str__(self):
        width = max(len("layer"), *(len(layer.path) for layer in self.layers))
        lines = [f"{'':>3} {'layer':<{width}} {'attention':>10} {'residual':>10}"]
        for layer in self.layers:
            attention = f"{layer.attention:.2%}" if layer.replaced else "softmax"
            residual = "-" if layer.residual is None else f"{layer.residual:.2%}"
            lines.append(
                f"{layer.index:>3} {layer.path:<{width}} {attention:>10} {residual:>10}"
            )
        return "\n".join(lines)


def swap_report(original, converted, inputs):
    """The error that each replaced attention layer causes, on one batch.

    Shows which layers to leave to softmax, by `layers` of `convert_backbone`: those
    with a large error of their own, and those after which the residual stream is far
    off.

    Args:
        original: A backbone or another model.
        converted: What `convert_backbone` made of it, or a copy of it after
            `replace_attention`.
        inputs: One batch, as the models take it.

    Returns:
        A `SwapReport`.

    Raises:
        ValueError: If the models have different numbers of self-attention layers.

    Example:

    ```python
    from keras_efficient_attn.swap import convert_backbone, swap_report

    efficient = convert_backbone(backbone, "performer:window=32")
    print(swap_report(backbone, efficient, preprocessor(texts)))
    ```
    """
    old, new = attention_places(original), attention_places(converted)
    if len(old) != len(new):
        raise ValueError(
            "`original` and `converted` must have as many self-attention layers. "
            f"Received: {len(old)} and {len(new)}"
        )
    old_attention, old_blocks = _recorded_calls(original, old, inputs)
    _, new_blocks = _recorded_calls(converted, new, inputs)
    errors = []
    for index, (old_place, place) in enumerate(zip(old, new, strict=True)):
        calls = old_attention[index]
        rows = [_valid_rows(old_place, kwargs) for _, kwargs, _ in calls]
        again = [place.layer(*args, **kwargs) for args, kwargs, _ in calls]
        residual = None
        if place.parent is not converted:
            residual = _relative_error(old_blocks[index], new_blocks[index], rows)
        errors.append(
            LayerError(
                index,
                place.layer.path,
                isinstance(place.layer, StandIn),
                _relative_error([output for *_, output in calls], again, rows),
                residual,
            )
        )
    return SwapReport(errors)


def _recorded_calls(model, places, inputs):
    """The calls of attention layers, and the outputs of the blocks around them.

    Returns:
        Two lists, with an entry a place: a list of `(args, kwargs, output)`, and a
        list of outputs.
    """
    attention = [[] for _ in places]
    blocks = [[] for _ in places]
    with contextlib.ExitStack() as stack:
        for place, calls, outputs in zip(places, attention, blocks, strict=True):
            stack.enter_context(_recording(place.layer, calls))
            if place.parent is not model:
                stack.enter_context(_recording(place.parent, outputs))
        model(inputs, training=False)
    return attention, [[output for *_, output in calls] for calls in blocks]


@contextlib.contextmanager
def _recording(layer, calls):
    call = layer.call

    def recorded(*args, **kwargs):
        output = call(*args, **kwargs)
        calls.append((args, kwargs, output))
        return output

    layer.call = recorded
    try:
        yield
    finally:
        del layer.call


def _valid_rows(place, kwargs):
    """`(batch, length)` of positions that are no padding, or `None` for all."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return None
    if mask.shape[-2] != 1:
        mask = place.stand_in.mask_of_keys(mask)
    return ops.convert_to_numpy(mask)[..., 0, :].astype(bool)


def _relative_error(old, new, rows):
    difference, norm = 0.0, 0.0
    for first, second, kept in zip(old, new, rows, strict=True):
        first, second = _array(first), _array(second)
        if kept is not None:
            first, second = first[kept], second[kept]
        difference += np.sum(np.square(second - first))
        norm += np.sum(np.square(first))
    return float(np.sqrt(difference / norm)) if norm else 0.0


def _array(output):
    output = output[0] if isinstance(output, tuple) else output
    return ops.convert_to_numpy(ops.cast(output, "float32")).astype("float64")
