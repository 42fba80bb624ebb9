"""The effect of a conversion, and of each path of its layers, on a model's output."""

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
from keras_efficient_attn.models.conversion.trace import run

WHOLE = "as it is"
# Names that KerasHub's backbones give their last hidden states.
STATES = ("decoder_sequence_output", "sequence_output")
PATHS = {"window only": window_only, "linear path only": linear_path_only}


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


def path_errors(original, converted, sites, inputs, rows):
    """A list of `PathError`: the whole model and, if there are two paths, each path.

    Args:
        original, converted: Models.
        sites: The `AttentionSite`s of `converted`.
        inputs: One batch.
        rows: From `valid_rows` of the last attention layer.
    """
    is_task = isinstance(original, keras_hub.models.Task)
    compare = _compare_logits if is_task else _compare_states
    expected = last_output(original, inputs)
    paths = {WHOLE: contextlib.nullcontext}
    if any(map(has_two_paths, sites)):
        paths |= PATHS
    errors = []
    for name, path in paths.items():
        with path(sites):
            found = last_output(converted, inputs)
        errors.append(PathError(name, *compare(expected, found, rows)))
    return errors


def last_output(model, inputs):
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


def text_means(states, rows):
    """Mean hidden states of texts, `(batch, dim)`; two axes are returned unchanged.

    Args:
        states: `(batch, length, dim)`.
        rows: Boolean `(batch, length)` or `None`: positions that count.
    """
    if states.ndim != 3:
        return states.reshape(len(states), -1)
    kept = np.ones(states.shape[:2]) if rows is None else rows
    number = np.maximum(kept.sum(1, keepdims=True), 1)
    return np.einsum("btd,bt->bd", states, kept) / number


def logit_divergence(old, new, rows):
    """The mean of `KL(softmax(old) ‖ softmax(new))` over positions that count."""
    if rows is not None and old.shape[:-1] == rows.shape:
        old, new = old[rows], new[rows]
    old, new = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (old, new))
    return float(np.sum(np.exp(old) * (old - new), axis=-1).mean())


def _compare_states(old, new, rows):
    old, new = text_means(old, rows), text_means(new, rows)
    norms = np.linalg.norm(old, axis=-1) * np.linalg.norm(new, axis=-1)
    return float(np.mean(np.sum(old * new, axis=-1) / norms)), None, None


def _compare_logits(old, new, rows):
    divergence = logit_divergence(old, new, rows)
    same = old.argmax(-1) == new.argmax(-1)
    if rows is not None and same.shape == rows.shape:
        same = same[rows]
    return None, divergence, float(np.mean(same))
