"""Plots steps and accuracy by difficulty."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def write_picture(results, path):
    """Writes a row of two plots for each task.

    Args:
        results: Dict from task to a list of `(label, measured)`.
        path: Path of a PNG file.
    """
    figure, rows = plt.subplots(
        len(results), 2, figsize=(9, 3.2 * len(results)), squeeze=False
    )
    for (task, measured), axes in zip(results.items(), rows, strict=True):
        for label, result in measured:
            difficulty = list(result["by_difficulty"])
            columns = zip(*result["by_difficulty"].values(), strict=True)
            for axis, values in zip(axes, columns, strict=True):
                axis.plot(difficulty, values, marker="o", markersize=3, label=label)
        for axis, name in zip(axes, ("accuracy", "steps"), strict=True):
            axis.set_title(f"{task}: {name}")
            axis.set_xlabel("difficulty")
        axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
