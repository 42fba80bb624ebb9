"""The results of runs: curves as CSV and PNG, and the comparison table."""

import csv
import io

from byte_lm.checkpoints import write_text
from tables import markdown

COLUMNS = (
    "step",
    "seconds",
    "seconds_per_step",
    "bits_per_byte",
    "val_bits_per_byte",
)
# Dashes distinguish the compressors without colour.
LINE_STYLES = {"gzip": ":", "xz": "--"}


def write_curve(path, curve):
    """Writes the rows of a training curve as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    write_text(path, text.getvalue())


def read_curve(path):
    """The rows of `write_curve`."""
    with open(path, newline="") as file:
        return [
            {name: float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def plot_curves(path, curves, result):
    """Plots bits per byte of training (thin) and validation text over the steps.

    Args:
        path: The PNG.
        curves: Rows of training curves by label.
        result: The result of a run, for its compressors, which are horizontal lines.
    """
    # Imported here: matplotlib takes a second to import, and draws without a display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, curve in curves.items():
        steps = [row["step"] for row in curve]
        validation = [row["val_bits_per_byte"] for row in curve]
        (line,) = axes.plot(steps, validation, marker=".", label=label)
        training = [row["bits_per_byte"] for row in curve]
        axes.plot(steps, training, color=line.get_color(), linewidth=0.5)
    for name, style in LINE_STYLES.items():
        bits = result[name]
        axes.axhline(bits, color="black", linestyle=style, label=f"{name} {bits:.3f}")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def comparison_table(results):
    """A table with one line for each result of a run."""
    lengths = list(results[0]["bits_per_byte"])
    header = [
        "attention",
        "parameters",
        *(f"bits at {int(length):,}" for length in lengths),
        "seconds per step",
        "bytes per second",
    ]
    rows = [
        [
            result["attention"],
            f"{result['parameters']:,}",
            *(f"{result['bits_per_byte'][length]:.3f}" for length in lengths),
            f"{result['seconds_per_step']:.3f}",
            f"{result['sampled_bytes_per_second']:,.0f}",
        ]
        for result in results
    ]
    return markdown(header, rows)
