"""Long sequences that are classified: the package of a source file."""

import numpy as np

from keras_efficient_attn.models import EfficientTextClassifier
from text_classes.data import batches, standard_library, test_windows
from verdict import both_ways
from verdict.models import backbone, fit

SIZES = {
    "layers": 2,
    "heads": 4,
    "dim": 64,
    "steps": 1200,
    "batch": 2,
    "learning_rate": 2e-3,
    "length": 4096,
    "test_windows": 32,
    "classes": 8,
}
# The same candidates take part as in masked models.
options = both_ways.options


def measure(options, seed, sizes):
    """Accuracy on windows of held-out files."""
    texts = standard_library(sizes["classes"])
    model = EfficientTextClassifier(
        backbone(options, sizes, 256, "encoder", seed), len(texts.labels)
    )
    fit(model, batches(texts, sizes["length"], sizes["batch"], seed), sizes)
    inputs, labels = test_windows(texts, sizes["length"], sizes["test_windows"])
    logits = model.predict(inputs, batch_size=sizes["batch"], verbose=0)
    return {"accuracy": float(np.mean(logits.argmax(-1) == labels))}
