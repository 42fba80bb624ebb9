"""Pictures of time and memory over length."""

from keras_efficient_attn.benchmark.settings import SOFTMAX

FIELDS = {
    "time": ("seconds", "milliseconds", 1e3),
    "memory": ("memory_bytes", "MiB at the peak", 2**-20),
}
# Okabe and Ito's colours, which the colour-blind can tell apart; softmax is grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SOFTMAX_COLOR = "#888888"
MARKERS = "osD^vP*X<>"


def write_plots(comparison, folder):
    """Writes `time.png` and `memory.png`, those that have points.

    Args:
        comparison: `Comparison`.
        folder: `pathlib.Path` of a folder that exists.

    Returns:
        List of the paths written.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    for name, (field, unit, scale) in FIELDS.items():
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if not draw(axes, comparison, field, scale):
            continue
        settings = comparison.settings
        axes.set_xlabel("length")
        per_token = name == "time" and settings.mode == "decode"
        axes.set_ylabel(f"{unit} per token" if per_token else unit)
        axes.set_title(f"{settings.mode}, {settings.backend}, {settings.dtype}")
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
    return written


def draw(axes, comparison, field, scale):
    """Draws one line per contestant and their legend.

    Args:
        axes: Axes of matplotlib.
        comparison: `Comparison`.
        field: Name of a field of `Record`.
        scale: Factor from the field's unit to that of the picture.

    Returns:
        Whether there were points to draw.
    """
    lengths, lines = set(), []
    others = [name for name in comparison.contestants() if name != SOFTMAX]
    for contestant in comparison.contestants():
        points = {n: y for n, y in comparison.series(contestant, field).items() if y}
        if not points:
            continue
        lengths.update(points)
        # The place of softmax is 0.
        place = 0 if contestant == SOFTMAX else 1 + others.index(contestant)
        (line,) = axes.loglog(
            sorted(points),
            [scale * points[length] for length in sorted(points)],
            color=COLORS[(place - 1) % len(COLORS)] if place else SOFTMAX_COLOR,
            marker=MARKERS[place % len(MARKERS)],
            markersize=5,
            label=contestant,
        )
        lines.append(line)
    if not lines:
        return False
    # The legend has the order of the lines' ends, from above.
    lines.sort(key=lambda line: -line.get_ydata()[-1])
    axes.figure.legend(handles=lines, loc="outside lower center", ncols=2, fontsize=8)
    axes.set_xticks(sorted(lengths), [f"{length:,}" for length in sorted(lengths)])
    axes.minorticks_off()
    axes.grid(True, which="major", linewidth=0.3)
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:,.6g}")
    return True
