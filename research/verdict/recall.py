"""Associative recall, and tracking a state, in one block of one head."""

from types import SimpleNamespace

from associations.training import run

COMMON = {
    "layers": 1,
    "heads": 1,
    "dim": 32,
    "steps": 1000,
    "batch": 16,
    "learning_rate": 5e-3,
    "test_sequences": 256,
    "stop_at": 0.99,
    "validate_every": 100,
}
RECALL = {"task": "recall", "pairs": [4, 8, 16, 20], "writes": 1, "vocabulary": 256}
TRACKED = {"pairs": [], "writes": 0, "length": 32}
SIZES = {
    **COMMON,
    "recall": {**RECALL, "length": 64},
    # The same pairs, asked for later.
    "long_recall": {**RECALL, "length": 256},
    "parity": {"task": "parity", "vocabulary": 2, **TRACKED},
    "permutations": {"task": "permutations", "vocabulary": 6, **TRACKED},
}


def options(candidate, convolution):
    """Options of the model of one block."""
    return candidate.small_options(convolution)


def measure(options, seed, sizes):
    """Accuracies by the number of pairs, or by the length, and bytes of the state."""
    results = {}
    for task in ("recall", "long_recall", "parity", "permutations"):
        arguments = SimpleNamespace(
            **{name: sizes[name] for name in COMMON},
            **sizes[task],
            convolution=options["convolution"] or 0,
            verbose=0,
        )
        found = run(
            options["attention"], sizes["dim"], sizes["learning_rate"], seed, arguments
        )
        results[task] = {
            "accuracy": {str(k): v for k, v in found["accuracy"].items()},
            "state_bytes": found["state_bytes"],
        }
    return results
