"""How much of a model's output a swap keeps."""

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
    # The function that Keras compiled may read other paths of the layers.
    backbone.make_predict_function(force=True)
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
