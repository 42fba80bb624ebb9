"""Runs of the verdict: one JSON each, so that a stopped command goes on."""

import datetime
import hashlib
import json
import re
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Runs:
    """The runs of one part, in `folder/part`.

    Args:
        folder: Of all results.
        part: Name of the part.
        sizes: Dict of the part's sizes. A run with other sizes is another run.
    """

    def __init__(self, folder, part, sizes):
        self.folder, self.part, self.sizes = Path(folder) / part, part, sizes

    def path(self, candidate, convolution, seed, options):
        described = json.dumps([self.sizes, options], sort_keys=True).encode()
        name = re.sub(r"\W+", "-", candidate)
        name += "-convolution" if convolution else ""
        digest = hashlib.sha256(described).hexdigest()[:6]
        return self.folder / f"{name}-{seed}-{digest}.json"

    def run(self, candidate, convolution, seed, options, measure):
        """The record of a run, for which `measure(options, seed, sizes)` is called.

        Only if its file is missing. Other options are another run.
        """
        path = self.path(candidate, convolution, seed, options)
        if path.exists():
            return json.loads(path.read_text())
        # It imports Keras, which reads the backend once.
        from keras_efficient_attn.benchmark.worker import describe_environment

        start = time.perf_counter()
        result = measure(options, seed, self.sizes)
        record = {
            "part": self.part,
            "candidate": candidate,
            "convolution": convolution,
            "seed": seed,
            "options": options,
            "sizes": self.sizes,
            "result": result,
            "seconds": round(time.perf_counter() - start, 1),
            "date": datetime.date.today().isoformat(),
            "environment": describe_environment(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(path)
        return record


def read(folder, part):
    """The records of a part, in the order of their files' names."""
    return [
        json.loads(path.read_text())
        for path in sorted(Path(folder, part).glob("*.json"))
    ]
