"""Stores runs as JSON lines, and shows them as tables and a plot."""

import json

import keras
import numpy as np

from associations import TRACKING
from tables import mean_and_spread

# A run counts if these settings match the command and its other four settings are
# requested.
FIXED = (
    "task",
    "pairs",
    "writes",
    "length",
    "vocabulary",
    "layers",
    "heads",
    "convolution",
    "steps",
    "batch",
    "stop_at",
    "validate_every",
    "test_sequences",
)
MARKERS = "osv^D<>PX*h"


class Runs:
    """The file of all runs; only runs with this command's settings count.

    Args:
        arguments: The command line's.
    """

    def __init__(self, arguments):
        self.path = arguments.out / "runs.jsonl"
        self.fixed = {name: getattr(arguments, name) for name in FIXED}
        self.fixed["backend"] = keras.backend.backend()
        text = self.path.read_text() if self.path.exists() else ""
        # The file may end with a partly written line after an interrupt.
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        self.records = [json.loads(line) for line in whole.splitlines()]

    def find(self, attention, dim, learning_rate, seed):
        """The record of a run, or `None`."""
        wanted = self.settings(attention, dim, learning_rate, seed)
        for record in self.records:
            if wanted.items() <= record.items():
                return record
        return None

    def add(self, attention, dim, learning_rate, seed, result):
        """Writes a run's line and prints its accuracy."""
        record = self.settings(attention, dim, learning_rate, seed) | result
        # JSON keys of `accuracy` are strings.
        line = json.dumps(record)
        self.records.append(json.loads(line))
        with open(self.path, "a") as file:
            file.write(line + "\n")
        shown = ", ".join(f"{k}: {v:.3f}" for k, v in result["accuracy"].items())
        print(
            f"{attention}, width {dim}, rate {learning_rate:g}, seed {seed}: {shown} "
            f"({result['steps_taken']} steps, {result['seconds']:.0f} s)",
            flush=True,
        )

    def settings(self, attention, dim, learning_rate, seed):
        """The settings that identify a run."""
        own = dict(attention=attention, dim=dim, learning_rate=learning_rate, seed=seed)
        return self.fixed | own

    def best(self, attention, dim, arguments):
        """The records of all seeds at the learning rate that is best in validation."""
        return max(
            (
                [self.find(attention, dim, rate, seed) for seed in arguments.seeds]
                for rate in arguments.learning_rates
            ),
            key=lambda records: np.mean(
                [list(record["validation"].values()) for record in records]
            ),
        )


def accuracy_of(record):
    """A run's accuracies, in the order of the numbers of pairs or the lengths."""
    accuracy = record["accuracy"]
    return [accuracy[name] for name in sorted(accuracy, key=int)]


def columns(record):
    """The numbers of pairs, or lengths, of those accuracies."""
    return sorted(map(int, record["accuracy"]))


def table(runs, arguments):
    """Header and rows: mean accuracy and its deviation over the seeds, by width."""
    asked = "length" if arguments.task in TRACKING else "pairs"
    lines = []
    for dim in arguments.dim:
        rows = {
            attention: runs.best(attention, dim, arguments)
            for attention in arguments.attention
        }
        names = columns(next(iter(rows.values()))[0])
        header = ["attention", "width", "bytes", "rate"]
        header += [f"{asked} {names[0]}", *map(str, names[1:])]
        for attention, records in rows.items():
            found = 100 * np.array([accuracy_of(record) for record in records])
            cells = [attention, dim, f"{records[0]['state_bytes']:,}"]
            cells.append(f"{records[0]['learning_rate']:g}")
            lines.append([*cells, *(mean_and_spread(x, 1) for x in found.T.tolist())])
    return header, lines


def plot(path, runs, arguments):
    """Plots accuracy by state bytes at the most pairs, or by length for a state
    to track."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tracking = arguments.task in TRACKING
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for index, attention in enumerate(arguments.attention):
        best = [runs.best(attention, dim, arguments) for dim in arguments.dim]
        found = 100 * np.array([[accuracy_of(r) for r in records] for records in best])
        if tracking:
            # Uses the axes of the last width.
            x, points = columns(best[-1][0]), found[-1]
        else:
            x = [records[0]["state_bytes"] for records in best]
            points = found[:, :, -1].T
        mean = points.mean(0)
        axes.errorbar(
            x,
            mean,
            (mean - points.min(0), points.max(0) - mean),
            marker=MARKERS[index % len(MARKERS)],
            capsize=3,
            label=attention,
        )
    most = max(arguments.pairs, default=None)
    axes.set(
        xscale="log",
        xlabel="length" if tracking else "bytes of state",
        ylabel="accuracy, %",
        ylim=(-2, 102),
        title=f"{arguments.task}, trained at length {arguments.length}"
        + ("" if tracking else f", {most} pairs"),
    )
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
