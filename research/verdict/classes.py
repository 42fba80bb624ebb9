"""Long sequences that are classified: ListOps, and the package of a source file."""

import itertools

import numpy as np

from keras_efficient_attn.models import EfficientTextClassifier
from text_classes.data import batches, standard_library, test_windows
from verdict import both_ways, listops
from verdict.models import backbone, fit

SIZES = {
    "layers": 2,
    "heads": 4,
    "dim": 64,
    "learning_rate": 2e-3,
    "listops": {"steps": 1500, "batch": 4, "length": 1000, "test_rows": 500},
    "packages": {"steps": 300, "batch": 2, "length": 4096, "test_windows": 32},
    "classes": 8,
}
# The rows of ListOps for the test are drawn with it; training has seeds of two numbers.
TEST_SEED = 10**6
# The same candidates take part as in masked models.
options = both_ways.options


def measure(options, seed, sizes):
    """Accuracy on both tasks."""
    texts = standard_library(sizes["classes"])
    own = sizes["packages"]
    results = {}
    data = {
        "listops": (
            listops_batches(sizes["listops"], seed),
            listops.rows(
                np.random.default_rng(TEST_SEED),
                sizes["listops"]["test_rows"],
                sizes["listops"]["length"],
            ),
            listops.VOCABULARY,
            10,
        ),
        "packages": (
            batches(texts, own["length"], own["batch"], seed),
            test_windows(texts, own["length"], own["test_windows"]),
            256,
            len(texts.labels),
        ),
    }
    for task, (training, (inputs, labels), vocabulary, count) in data.items():
        model = EfficientTextClassifier(
            backbone(options, sizes, vocabulary, "encoder", seed),
            count,
        )
        fit(model, training, {**sizes, **sizes[task]})
        logits = model.predict(inputs, batch_size=sizes[task]["batch"], verbose=0)
        results[task] = {"accuracy": float(np.mean(logits.argmax(-1) == labels))}
    return results


def listops_batches(sizes, seed):
    """Endless batches; batch `k` depends on `seed` and `k` only."""
    for step in itertools.count():
        random = np.random.default_rng([seed, step])
        yield listops.rows(random, sizes["batch"], sizes["length"])
