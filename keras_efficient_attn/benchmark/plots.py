"""Pictures of time and memory over length, readable in black and white."""

FIELDS = {
    "time": ("seconds", "seconds"),
    "memory": ("memory_bytes", "bytes at the peak"),
}
MARKERS = "osD^vP*X<>"
LINES = ("-", "--", "-.", ":")


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
    for name, (field, label) in FIELDS.items():
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if not draw(axes, comparison, field):
            continue
        settings = comparison.settings
        axes.set_xlabel("length")
        axes.set_ylabel(f"{label} a position" if _per_token(name, settings) else label)
        axes.set_title(f"{settings.mode}, {settings.backend}, {settings.dtype}")
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
    return written


def draw(axes, comparison, field):
    """Draws a line a contestant, with its name at the end; whether there were any."""
    ends = []
    for i, contestant in enumerate(comparison.contestants()):
        points = {n: y for n, y in comparison.series(contestant, field).items() if y}
        if not points:
            continue
        lengths, values = zip(*sorted(points.items()), strict=True)
        shade = str(0.0 if i % 2 == 0 else 0.45)
        axes.loglog(
            lengths,
            values,
            color=shade,
            linestyle=LINES[i % len(LINES)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
        )
        ends.append((values[-1], lengths[-1], f" {contestant}", shade))
    if not ends:
        return False
    axes.set_xscale("log", base=2)
    axes.grid(True, which="major", linewidth=0.3)
    _label(axes, sorted(ends))
    return True


def _label(axes, ends):
    """Writes names beside the ends of lines, apart from each other."""
    axes.figure.canvas.draw()
    height, lowest = 11, -float("inf")
    for value, length, name, shade in ends:
        x, y = axes.transData.transform((length, value))
        # In points, as the offset of an annotation is.
        y *= 72 / axes.figure.dpi
        lowest = max(y, lowest + height)
        axes.annotate(
            name,
            (length, value),
            xytext=(5, lowest - y),
            textcoords="offset points",
            color=shade,
            fontsize=8,
            va="center",
        )


def _per_token(name, settings):
    return name == "time" and settings.mode == "decode"
