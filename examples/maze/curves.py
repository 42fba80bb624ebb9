"""Learning curves as CSV, plot and table."""

import csv

import numpy as np

# Number of updates to average for the curve and the table.
WINDOW = 20
LABELS = {"gtrxl": "GTrXL", "xl": "Transformer-XL", "lstm": "LSTM"}
# Dashes distinguish the agents without colour.
STYLES = {"gtrxl": "-", "xl": ":", "lstm": "--"}


def write(path, curves):
    """One line for each agent, seed and update."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["agent", "run", "update", "found"])
        for agent, runs in curves.items():
            for run, found in enumerate(runs):
                writer.writerows(
                    [agent, run, update, value] for update, value in enumerate(found, 1)
                )


def smooth(found):
    """Means over `WINDOW` updates, or as many as there are."""
    width = min(WINDOW, len(found))
    return np.convolve(found, np.full(width, 1 / width), mode="valid")


def plot(path, curves, corridor, episodes):
    """The mean of each agent's runs, between the lowest and the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for agent, runs in curves.items():
        points = 100 * np.stack([smooth(found) for found in runs])
        x = episodes * (len(runs[0]) - points.shape[1] + 1 + np.arange(points.shape[1]))
        (line,) = axes.plot(
            x, points.mean(0), STYLES[agent], label=LABELS[agent], linewidth=2
        )
        axes.fill_between(
            x, points.min(0), points.max(0), color=line.get_color(), alpha=0.2
        )
    axes.axhline(50, color="0.6", linewidth=1)
    axes.set(
        xlabel="episodes",
        ylabel="goal found, %",
        ylim=(0, 102),
        title=f"T-maze, corridor of {corridor}, {len(runs)} runs",
    )
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(curves):
    """Header and rows: percentage of the last episodes that found the goal."""
    lines = []
    for agent, runs in curves.items():
        last = [100 * smooth(found)[-1] for found in runs]
        each = ", ".join(f"{value:.0f}" for value in last)
        lines.append([LABELS[agent], f"{np.mean(last):.0f}", each])
    return ["agent", "mean", "by run"], lines
