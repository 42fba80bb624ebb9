"""The results as text, CSV, JSON, and pictures of time and memory over length."""

import csv
import dataclasses
import json
import textwrap
from pathlib import Path

from keras_efficient_attn.benchmark.records import (
    OK,
    SLOWER,
    Comparison,
    Record,
    time_ratios,
)
from keras_efficient_attn.benchmark.settings import MATMUL, SOFTMAX, Settings

DASH = "-"
# The pictures: a field of `Record`, its unit, and the factor to that unit.
FIELDS = {
    "time": ("seconds", "milliseconds", 1e3),
    "memory": ("memory_bytes", "MiB at the peak", 2**-20),
}
# Okabe and Ito's colours, which the colour-blind can tell apart; softmax is grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SOFTMAX_COLOR = "#888888"
MARKERS = "osD^vP*X<>"


def table(comparison):
    """The results as lines of text: one per contestant and length, then the summary."""
    softmax = comparison.series(SOFTMAX, "seconds")
    per_step = "ms/token" if comparison.settings.mode == "decode" else "ms"
    rows = [
        (
            "contestant",
            "length",
            per_step,
            "quartiles",
            "tokens/s",
            "MiB",
            "compile s",
            "of peak",
            "softmax/it",
            "error",
            "",
        )
    ]
    rows += [
        _row(record, softmax.get(record.length))
        for name in comparison.contestants()
        for record in comparison.of(name)
    ]
    lines = align(rows)
    summary = [("contestant", "faster than softmax from", "time slope", "memory slope")]
    summary += [
        (
            item.contestant,
            item.crossover or DASH,
            format_number(item.time_slope, ".2f"),
            format_number(item.memory_slope, ".2f"),
        )
        for item in comparison.summaries()
    ]
    return "\n".join([*lines, "", *align(summary), "", *_notes(comparison)])


def align(rows):
    """Rows of words as lines; the first column is left-aligned, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1])]
        cells += [cell.rjust(width) for cell, width in others]
        lines.append("  ".join(cells).rstrip())
    return lines


def write_csv(comparison, path):
    """Writes one line per record, with the field names of `Record`."""
    with open(path, "w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Record)]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(record) for record in comparison.records)


def write_json(comparison, path):
    """Writes settings, versions and devices, records and summaries."""
    summaries = [dataclasses.asdict(item) for item in comparison.summaries()]
    content = {**dataclasses.asdict(comparison), "summaries": summaries}
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def read_json(path):
    """The `Comparison` that `write_json` wrote.

    Raises:
        ValueError: If the file cannot be read as one.
    """
    try:
        content = json.loads(Path(path).read_text())
        return Comparison(
            Settings(**content["settings"]),
            [Record(**record) for record in content["records"]],
            content["environment"],
            content["complete"],
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a file that this command wrote: {type(error).__name__}: "
            f"{error}"
        ) from error


def slower(comparison, before):
    """Lines about what takes over a tenth longer than in an earlier `Comparison`."""
    ratios = time_ratios(comparison, before)
    rows = [
        (name, f"{length}", f"{ratio:.2f}")
        for (name, length), ratio in ratios.items()
        if ratio > SLOWER
    ]
    if not rows:
        return f"Of {len(ratios)} times, none is over a tenth longer than before."
    return "\n".join(align([("slower than before", "length", "times as long"), *rows]))


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


def _row(record, softmax_seconds):
    if record.status != OK:
        blanks = [DASH] * 7
        cell = record.status
        return (
            record.contestant,
            f"{record.length}",
            cell,
            *blanks,
            f"({textwrap.shorten(record.detail, 100)})",
        )
    low, high = record.seconds_low, record.seconds_high
    ratio = softmax_seconds and softmax_seconds / record.seconds
    return (
        record.contestant,
        f"{record.length}",
        format_number(record.seconds * 1e3, ".3g"),
        f"{format_number(low * 1e3, '.3g')}-{format_number(high * 1e3, '.3g')}",
        f"{record.tokens_per_second:,.0f}",
        format_number(record.memory_bytes / 2**20, ".1f"),
        format_number(record.compile_seconds, ".2f"),
        format_number(record.peak_share, ".1%"),
        format_number(ratio, ".2f"),
        format_number(record.error, ".2e"),
        record.detail,
    )


def _notes(comparison):
    settings = comparison.settings
    kind = "language model" if settings.model else "layer"
    yield (
        f"{kind}, {settings.mode}{', causal' if settings.causal else ''}: batch "
        f"{settings.batch}, {settings.heads} heads of {settings.head_dim}, "
        f"{settings.dtype}; medians and quartiles of up to {settings.repeats} turns"
    )
    environment = comparison.environment
    if environment:
        used = [record for record in comparison.records if record.execution]
        execution = sorted({record.execution for record in used})
        memory = sorted({record.memory_kind for record in used})
        yield (
            f"{settings.backend} {environment['backend_version']} "
            f"({', '.join(execution)}), "
            f"Keras {environment['keras']}, on {environment['device']} "
            f"({environment['cpu_count']} cores of {environment['cpu']}); "
            f"MiB: {', '.join(memory) or 'not measured'}"
        )
    peaks = [r for r in comparison.of(MATMUL) if r.status != OK]
    for record in peaks:
        yield f"no share of peak at {record.length}: matmul: {record.status}"
    if not comparison.complete:
        shown = {record.length for record in comparison.records}
        missing = len(shown) < len(settings.lengths)
        yield f"Interrupted{': longer lengths are missing' if missing else ''}."


def format_number(number, how):
    """A number as text, or a dash for `None`."""
    if number is None:
        return DASH
    text = format(number, how)
    # Write large numbers in full, not as 1.23e+04.
    return f"{number:.0f}" if how.endswith("g") and "e+" in text else text
