"""Time and memory of the candidates' layers, by the benchmark command."""

import dataclasses

import keras

from keras_efficient_attn.benchmark.compare import run
from keras_efficient_attn.benchmark.report import read_json, write_json
from keras_efficient_attn.benchmark.settings import Settings
from verdict.candidates import CANDIDATES

# A training step of a causal layer, and one position after so many others.
MODES = ("train", "decode")
SIZES = {
    "lengths": [1024, 4096, 16384, 65536],
    "heads": 4,
    "head_dim": 64,
    "causal": True,
    "repeats": 3,
    "time_limit": 60.0,
}


def measure(folder, candidates, sizes):
    """Measures what is missing on Keras' backend, one file for each length and mode.

    A file of other settings is missing too, and replaced.

    Args:
        folder: `pathlib.Path` of the part's results.
        candidates: Names of candidates.
        sizes: Dict as `SIZES`.

    Yields:
        `Comparison` of each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = {}
    for name in candidates:
        layers |= dict.fromkeys(CANDIDATES[name].layers)
    backend = keras.backend.backend()
    options = {name: sizes[name] for name in sizes if name != "lengths"}
    for length in sizes["lengths"]:
        for mode in MODES:
            path = folder / f"{mode}-{backend}-{length}.json"
            settings = Settings(
                layers=tuple(layers), lengths=(length,), mode=mode, **options
            )
            if not has(path, settings):
                comparison = run(settings)
                if not comparison.complete:
                    raise KeyboardInterrupt
                write_json(comparison, path)
            yield read_json(path)


def has(path, settings):
    """Whether the file has these layers, and was measured with these settings."""
    if not path.exists():
        return False
    found = read_json(path).settings
    same = dataclasses.replace(found, layers=settings.layers) == settings
    return same and set(settings.layers) <= set(found.layers)
