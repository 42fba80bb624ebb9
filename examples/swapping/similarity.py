"""Similarity of a model's output after conversion, and training to restore it."""

import keras
import numpy as np


def hidden_states(backbone, outputs):
    """The last hidden states among a backbone's outputs, `(batch, length, dim)`."""
    return outputs["sequence_output"] if isinstance(outputs, dict) else outputs


def embeddings(backbone, batches):
    """The mean of the last hidden states of each text, a float64 array.

    Args:
        backbone: A backbone.
        batches: List of inputs.
    """
    rows = []
    for inputs in batches:
        outputs = backbone.predict_on_batch(inputs)
        hidden = np.asarray(hidden_states(backbone, outputs), "float64")
        mask = inputs["padding_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return np.concatenate(rows)


def cosines(first, second):
    """The cosine of each pair of rows."""
    products = np.sum(first * second, axis=-1)
    return products / np.linalg.norm(first, axis=-1) / np.linalg.norm(second, axis=-1)


def fine_tune(original, converted, batches, steps, learning_rate, verbose):
    """Trains a converted backbone to reproduce the original's hidden states.

    Needs texts, but no labels.

    Args:
        original, converted: Backbones.
        batches: Iterator of inputs.
        steps: Training steps.
        learning_rate: Learning rate of Adam.
        verbose: As for `keras.Model.fit`.
    """
    outputs = hidden_states(converted, converted.output)
    student = keras.Model(converted.input, outputs)

    def pairs():
        for inputs in batches:
            outputs = original.predict_on_batch(inputs)
            weight = inputs["padding_mask"].astype("float32")
            yield inputs, hidden_states(original, outputs), weight

    student.compile(
        optimizer=keras.optimizers.Adam(learning_rate, clipnorm=1.0),
        loss="mse",
        jit_compile=keras.backend.backend() != "torch",
    )
    student.fit(pairs(), steps_per_epoch=steps, verbose=verbose)
