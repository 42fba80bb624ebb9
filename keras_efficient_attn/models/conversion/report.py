"""The errors of efficient attention: of each layer, and of each path in the output."""

import contextlib
import dataclasses

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.models.conversion.paths import (
    has_two_paths,
    linear_path_only,
    window_only,
)
from keras_efficient_attn.models.conversion.sites import find_sites
from keras_efficient_attn.models.conversion.trace import (
    attention_error,
    relative_error,
    run,
    trace_layers,
    valid_positions,
)

WHOLE = "as it is"
# Names that KerasHub's backbones give their last hidden states.
STATES = ("decoder_sequence_output", "sequence_output")
PATHS = {"window only": window_only, "linear path only": linear_path_only}


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The error of one attention layer.

    Errors are `√(Σ‖new − old‖² / Σ‖old‖²)` over positions that are not padding.

    Attributes:
        index: Index for the argument `layers` of `convert_backbone`.
        path: Path of the attention layer.
        replaced: Whether it is an efficient layer.
        attention: Error of its output on the original's inputs: the effect of this
            layer alone. `None` if the original does not call the layer.
        residual: Error of its block's output in the converted model: the effect of all
            layers up to this one. `None` if the layer is in no block, or in several,
            or not called.
    """

    index: int
    path: str
    replaced: bool
    attention: float | None
    residual: float | None


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """The errors of all self-attention layers and the output; prints as tables.

    Attributes:
        layers: List of `LayerError`.
        paths: List of `PathError`: for the model's output and, if layers have a window
            and an estimate beyond it, for the window only and the linear path only.
    """

    layers: list
    paths: list

    def __str__(self):
        width = max(len("layer"), *(len(layer.path) for layer in self.layers))
        lines = [f"{'':>3} {'layer':<{width}} {'attention':>10} {'residual':>10}"]
        for layer in self.layers:
            attention = _percent(layer.attention) if layer.replaced else "softmax"
            residual = _percent(layer.residual)
            lines.append(
                f"{layer.index:>3} {layer.path:<{width}} {attention:>10} {residual:>10}"
            )
        lines += [
            "",
            f"{'output':<20}{'cosine':>12}{'divergence':>12}{'top equal':>12}",
        ]
        for path in self.paths:
            name, *cells = path.cells()
            lines.append(f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join(lines)


def swap_report(original, converted, inputs):
    """The errors of efficient attention, on one batch.

    Shows which layers should keep softmax (argument `layers` of `convert_backbone`):
    layers with a large error of their own, and layers after which the residual stream
    has a large error. It also shows the error of the model's output with the converted
    layers unchanged, with their window only, and with their estimate of all keys only.
    A model that is as good with the window alone does not need the linear path.

    Args:
        original: A backbone or another model. Logits are compared for a KerasHub task,
            otherwise the mean hidden states.
        converted: The result of `convert_backbone`, or a copy after
            `replace_attention`.
        inputs: One batch of the models' inputs.

    Returns:
        A `SwapReport`.

    Raises:
        ValueError: If the models have different numbers of self-attention layers.

    Example:

    ```python
    from keras_efficient_attn.models import convert_backbone, swap_report

    efficient = convert_backbone(backbone, "performer:window=32")
    print(swap_report(backbone, efficient, preprocessor(texts)))
    ```
    """
    old, new = find_sites(original), find_sites(converted)
    if len(old) != len(new):
        raise ValueError(
            "`original` and `converted` must have the same number of self-attention "
            f"layers. Received: {len(old)} and {len(new)}"
        )
    old_attention, old_blocks = _attention_and_blocks(original, old, inputs)
    _, new_blocks = _attention_and_blocks(converted, new, inputs)
    errors = []
    for index, (old_site, site) in enumerate(zip(old, new, strict=True)):
        calls = old_attention[index]
        attention = residual = None
        if calls:
            attention = attention_error(old_site, site.layer, calls)
        if calls and site.in_one_block:
            valid = [valid_positions(old_site, call) for call in calls]
            residual = relative_error(old_blocks[index], new_blocks[index], valid)
        errors.append(
            LayerError(index, site.layer.path, site.is_converted, attention, residual)
        )
    calls = old_attention[-1]
    last = valid_positions(old[-1], calls[-1]) if calls else None
    return SwapReport(errors, _path_errors(original, converted, new, inputs, last))


def _percent(error):
    return "-" if error is None else f"{error:.2%}"


def _attention_and_blocks(model, sites, inputs):
    """The calls of the attention layers, and the outputs of the blocks around them."""
    layers = [site.layer for site in sites]
    layers += [site.block for site in sites if site.in_one_block]
    calls = trace_layers(model, layers, inputs)
    blocks = iter(calls[len(sites) :])
    outputs = [
        [call.output for call in next(blocks)] if site.in_one_block else []
        for site in sites
    ]
    return calls[: len(sites)], outputs


@dataclasses.dataclass(frozen=True)
class PathError:
    """The error of a model's output, with all paths of its layers or only one.

    Attributes:
        path: `"as it is"`, `"window only"` or `"linear path only"`: the layers with a
            window and an estimate beyond it use only one of the two.
        cosine: Mean cosine of the mean hidden state of a text, or `None` for a task.
        divergence: Mean of `KL(original ‖ converted)` of the logits of a task in
            nats, else `None`.
        agreement: Share of positions where both logits of a task have the same argmax,
            else `None`.
    """

    path: str
    cosine: float | None
    divergence: float | None
    agreement: float | None

    def cells(self):
        """The row of a table, a list of strings."""
        values = self.cosine, self.divergence, self.agreement
        return [self.path, *("-" if v is None else f"{v:.4f}" for v in values)]


def _path_errors(original, converted, sites, inputs, valid):
    """A list of `PathError`: the whole model and, if there are two paths, each path.

    Args:
        original, converted: Models.
        sites: The `AttentionSite`s of `converted`.
        inputs: One batch.
        valid: From `valid_positions` of the last attention layer.
    """
    is_task = isinstance(original, keras_hub.models.Task)
    compare = _compare_logits if is_task else _compare_states
    expected = _last_output(original, inputs)
    paths = {WHOLE: contextlib.nullcontext}
    if any(map(has_two_paths, sites)):
        paths |= PATHS
    errors = []
    for name, path in paths.items():
        with path(sites):
            found = _last_output(converted, inputs)
        errors.append(PathError(name, *compare(expected, found, valid)))
    return errors


def _last_output(model, inputs):
    """A model's logits or last hidden states, as a float64 array.

    With several outputs: the decoder's, or the output with a known name, or the last
    with the most axes.
    """
    outputs = run(model, inputs, training=False)
    for name in STATES:
        if isinstance(outputs, dict) and name in outputs:
            outputs = outputs[name]
    outputs = keras.tree.flatten(outputs)
    output = max(reversed(outputs), key=lambda tensor: len(tensor.shape))
    return ops.convert_to_numpy(ops.cast(output, "float32")).astype("float64")


def _text_means(states, valid):
    """Mean hidden states of texts, `(batch, dim)`; two axes are returned unchanged.

    Args:
        states: `(batch, length, dim)`.
        valid: Boolean `(batch, length)` or `None`: positions that count.
    """
    if states.ndim != 3:
        return states.reshape(len(states), -1)
    kept = np.ones(states.shape[:2]) if valid is None else valid
    number = np.maximum(kept.sum(1, keepdims=True), 1)
    return np.einsum("btd,bt->bd", states, kept) / number


def _compare_states(old, new, valid):
    """The cosine of texts' mean states, and neither divergence nor agreement."""
    old, new = _text_means(old, valid), _text_means(new, valid)
    norms = np.linalg.norm(old, axis=-1) * np.linalg.norm(new, axis=-1)
    return float(np.mean(np.sum(old * new, axis=-1) / norms)), None, None


def _compare_logits(old, new, valid):
    """No cosine, the mean of `KL(softmax(old) ‖ softmax(new))`, and the agreement."""
    if valid is not None and old.shape[:-1] == valid.shape:
        old, new = old[valid], new[valid]
    same = old.argmax(-1) == new.argmax(-1)
    old, new = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (old, new))
    divergence = np.sum(np.exp(old) * (old - new), axis=-1)
    return None, float(divergence.mean()), float(np.mean(same))
