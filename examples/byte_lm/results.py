"""The results of a run: the curve as CSV and PNG, and the comparison table."""

import csv
import io

from byte_lm.checkpoints import write_text

COLUMNS = (
    "step",
    "seconds",
    "seconds_per_step",
    "bits_per_byte",
    "val_bits_per_byte",
)
# Dashes distinguish the baselines without colour.
LINE_STYLES = {"gzip": ":", "bz2": "-.", "xz": "--"}


def write_curve(path, curve):
    """Writes the rows of a training curve as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    write_text(path, text.getvalue())


def plot_curve(path, curve, baselines, test_bits, title):
    """Plots bits per byte over steps, with the compressors as horizontal lines."""
    # Imported here: matplotlib takes a second to import, and draws without a display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    steps = [row["step"] for row in curve]
    for column, label, style in (
        ("bits_per_byte", "training", {"color": "0.6", "linewidth": 3}),
        ("val_bits_per_byte", "validation", {"color": "black", "marker": "."}),
    ):
        axes.plot(steps, [row[column] for row in curve], label=label, **style)
    axes.plot(
        steps[-1:], [test_bits], "k*", markersize=12, label=f"test {test_bits:.3f}"
    )
    for name, bits in baselines.items():
        label = f"{name} {bits:.3f}"
        axes.axhline(bits, color="black", linestyle=LINE_STYLES[name], label=label)
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def comparison_table(results):
    """A table with one line for each result of a run."""
    width = max(len(result["attention"]) for result in results)
    lines = [
        f"{'attention':<{width}}  {'bits per byte':>13}  {'seconds per step':>16}  "
        f"{'peak memory (MiB)':>17}"
    ]
    for result in results:
        lines.append(
            f"{result['attention']:<{width}}  {result['bits_per_byte']:>13.3f}  "
            f"{result['seconds_per_step']:>16.3f}  {result['peak_mib']:>17.0f}"
        )
    return "\n".join(lines)


def verdict(bits, baselines):
    """One line that compares a model with the compressors."""
    parts = [
        f"{'beats' if bits < other else 'behind'} {name} ({other:.3f}) by "
        f"{abs(bits - other):.3f}"
        for name, other in baselines.items()
    ]
    return f"{bits:.3f} bits per byte: {', '.join(parts)}"
