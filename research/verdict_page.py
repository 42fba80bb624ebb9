"""Makes the verdict's tables and picture in the documentation from its runs.

    python research/verdict_page.py

Results are means and sample deviations over the seeds, of runs whose sizes and options
are those of today. `-` stands for what has not been measured or does not exist.
"""

import functools
import importlib
import math
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import folders
from command_line import Parser, UsageError, command
from tables import markdown, mean_and_spread
from verdict.candidates import CANDIDATES, PARTS
from verdict.runs import RESULTS, read

# What README shows.
FAMILIAR = ("gated-delta", "retention", "softmax", "local", "performer", "linear")
# The length of the longest test, at which states are compared.
LONG = 16384
# Costs are compared on one backend, and those of training on PyTorch too, which has
# fused softmax attention on a CPU; at the longest length that softmax attention trains
# at within the time limit on both.
BACKEND, COST_LENGTH = "jax", 4096
# Other learning rates are compared with one seed.
RATE_SEED = 0
BLUE, GREY = "#0072B2", "#888888"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="the runs")
    add("--root", type=Path, default=folders.ROOT, help="folder of README.md and docs")
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Writes the tables between their marks, and the picture."""
    rows, costs, rates = collect(arguments.results)
    if not rows:
        raise UsageError(f"--results {arguments.results} has no run")
    for name, tables in pages(rows, costs, rates).items():
        path = arguments.root / name
        text = path.read_text()
        for mark, lines in tables.items():
            marked = place(mark)
            if not marked.search(text):
                raise UsageError(f"--root {arguments.root}: {name} has no mark {mark}")
            text = marked.sub(rf"\g<1>{lines}\n\g<2>", text)
        path.write_text(text)
    draw(rows, costs, arguments.root / "docs" / "verdict.png")


def place(mark):
    """The pattern of a table's place: the marks around it are groups 1 and 2."""
    return re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)


def collect(folder):
    """All results.

    Args:
        folder: Of the runs.

    Returns:
        `(rows, costs, rates)`: a dict from `(candidate, convolution)` to a dict from a
        part to the results and seconds of the seeds, by the bits per byte at the length
        of training; a dict from `(mode, backend)` to a dict from a length to its
        `Comparison`; and a dict from a candidate, with a convolution, to the result of
        `RATE_SEED` by the learning rate.
    """
    from keras_efficient_attn.benchmark.report import read_json

    rows, rates = defaultdict(lambda: defaultdict(list)), defaultdict(dict)
    for part in PARTS:
        module = importlib.import_module(f"verdict.{part}")
        for record in read(folder, part):
            key = record["candidate"], record["convolution"]
            own = module.options(CANDIDATES[key[0]], key[1])
            if record["options"] != own:
                continue
            result = record["result"] | {"seconds": record["seconds"]}
            if record["sizes"] == module.SIZES:
                rows[key][part].append(result)
            # A run with another learning rate only is one of `rates`.
            rate = record["sizes"].get("learning_rate")
            described = part, record["convolution"], record["seed"], record["sizes"]
            asked = module.SIZES | {"learning_rate": rate}
            if described == ("language", True, RATE_SEED, asked):
                rates[key[0]][rate] = result
    costs = defaultdict(dict)
    for path in sorted((folder / "cost").glob("*.json")):
        comparison = read_json(path)
        settings = comparison.settings
        costs[settings.mode, settings.backend][settings.lengths[0]] = comparison
    rows = dict(sorted(rows.items(), key=lambda row: bits(row[1], 1024)))
    return rows, costs, rates


# Titles of the columns of each part: where the value is, digits, and a factor. `None`
# digits: it does not depend on the seed.
COLUMNS = {
    "language": {
        "bits per byte at 1,024": (("bits_per_byte", "1024"), 3, 1),
        "at 4,096": (("bits_per_byte", "4096"), 3, 1),
        "at 16,384": (("bits_per_byte", "16384"), 3, 1),
    },
    "depth": {
        "bits per byte at 1,024": (("bits_per_byte", "1024"), 3, 1),
        "at 4,096": (("bits_per_byte", "4096"), 3, 1),
        "at 16,384": (("bits_per_byte", "16384"), 3, 1),
    },
    "recall": {
        "recall of 20 pairs, %": (("recall", "accuracy", "20"), 1, 100),
        "in a row of 256, %": (("long_recall", "accuracy", "20"), 1, 100),
        "parity at 8 times, %": (("parity", "accuracy", "256"), 1, 100),
        "permutations, %": (("permutations", "accuracy", "256"), 1, 100),
        "bytes of state": (("recall", "state_bytes"), None, 1),
    },
    "both_ways": {
        "bits per hidden byte at 256": (("bits_per_byte", "256"), 3, 1),
        "at 1,024": (("bits_per_byte", "1024"), 3, 1),
    },
    "listops": {
        "whole rows, %": (("accuracy",), 1, 100),
        "all lists, %": (("inner_accuracy",), 1, 100),
    },
    "classes": {"packages, %": (("accuracy",), 1, 100)},
}


# README and `choosing.md` show the first columns; `choosing.md` adds the others.
QUALITY = [
    ("language", "bits per byte at 1,024"),
    ("language", "at 16,384"),
    ("recall", "recall of 20 pairs, %"),
    ("both_ways", "bits per hidden byte at 256"),
]
MORE_QUALITY = [
    ("recall", "parity at 8 times, %"),
    ("listops", "all lists, %"),
    ("classes", "packages, %"),
]


def pages(rows, costs, rates):
    """Dict from a page to its tables, by their marks."""
    shown = {
        name: row
        for (name, convolution), row in rows.items()
        if convolution and set(row) != {"depth"}
    }
    familiar = {name: row for name, row in shown.items() if name in FAMILIAR}
    quality, cost = quality_columns(QUALITY), cost_columns(costs)
    more = quality_columns(MORE_QUALITY)
    memory = {"memory of a training step": share_column(costs, "train", "memory_bytes")}
    return {
        "README.md": {"verdict": summary(familiar, quality | cost)},
        "docs/choosing.md": {
            "verdict": summary(shown, quality | more),
            "properties": summary(shown, cost | memory | PROPERTIES),
        },
        "docs/benchmarks/verdict.md": {
            **{part: part_table(rows, part) for part in PARTS},
            "cost": cost_table(costs),
            "hours": hours_table(rows, rates),
            "rates": rates_table(rates),
        },
    }


def part_table(rows, part):
    """The table of one part: a row for each candidate with a run of it."""
    columns = COLUMNS[part]
    lines = []
    for (name, convolution), row in rows.items():
        if row.get(part):
            cells = [cell(row, part, *column) for column in columns.values()]
            lines.append([name, yes(convolution), *cells, len(row[part])])
    return markdown(["attention", "convolution", *columns, "seeds"], lines)


def hours_table(rows, rates):
    """The number of runs of each part, and the hours that they took."""
    seconds = {
        part: [
            result["seconds"] for row in rows.values() for result in row.get(part, [])
        ]
        for part in PARTS
    }
    own = importlib.import_module("verdict.language").SIZES["learning_rate"]
    seconds["language"] += [
        result["seconds"]
        for found in rates.values()
        for rate, result in found.items()
        if rate != own
    ]
    seconds["all"] = [each for found in seconds.values() for each in found]
    lines = [
        [part, len(found), f"{sum(found) / 3600:.1f}"]
        for part, found in seconds.items()
    ]
    return markdown(["part", "runs", "hours"], lines)


def rates_table(rates):
    """Bits per byte by the learning rate, of candidates with several."""
    several = {name: found for name, found in rates.items() if len(found) > 1}
    columns = {
        f"{rate:g}": lambda name, found, rate=rate: (
            f"{at(found[rate], ('bits_per_byte', '1024')):.3f}"
            if rate in found
            else "-"
        )
        for rate in sorted({rate for found in several.values() for rate in found})
    }
    return summary(several, columns)


def summary(rows, columns):
    """A table of candidates, without columns of what nobody has measured.

    Args:
        rows: Dict from a candidate to its results by part.
        columns: Dict from a title to a function of both that makes the cell.
    """
    table = {"attention": list(rows)}
    for title, make in columns.items():
        cells = [make(name, row) for name, row in rows.items()]
        if set(cells) != {"-"}:
            table[title] = cells
    return markdown(list(table), list(map(list, zip(*table.values(), strict=True))))


def quality_columns(chosen):
    """Columns for `summary` of pairs of a part and the title of a column of it."""
    return {
        title: lambda name, row, part=part, title=title: cell(
            row, part, *COLUMNS[part][title]
        )
        for part, title in chosen
    }


def cost_columns(costs):
    """Columns for `summary` of times, memory and the state."""

    return {
        "training step": share_column(costs, "train", "seconds"),
        "on PyTorch": share_column(costs, "train", "seconds", "torch"),
        "generated token": share_column(costs, "decode", "seconds"),
        "state, KiB": lambda name, row: f"{facts(name)['bytes'] / 1024:,.0f}",
    }


def share_column(costs, mode, field, backend=BACKEND):
    """A column for `summary` of `relative`."""

    def make(name, row):
        value = relative(name, costs, mode, field, backend)
        return "-" if value is None else f"{value:.2g}"

    return make


# Columns for `summary` of what the layers say of themselves.
PROPERTIES = {
    "streams with": lambda name, row: facts(name)["streams"],
    "takes trained softmax": lambda name, row: yes(facts(name)["replaces"]),
    "causal": lambda name, row: (
        "always" if CANDIDATES[name].causal_only else "optional"
    ),
}


def cost_table(costs):
    """Milliseconds of each layer by mode, backend and length; memory; machines."""
    tables, machines = [], defaultdict(set)
    for (_, backend), found in sorted(costs.items()):
        for comparison in found.values():
            about = comparison.environment
            machines[backend].add(f"{about['cpu_count']} cores of {about['cpu']}")
    for mode, title in MODES.items():
        measured = {b: found for (m, b), found in sorted(costs.items()) if m == mode}
        if not measured:
            continue
        columns = [(b, n) for b in measured for n in sorted(measured[b])]
        names = dict.fromkeys(
            name for b, n in columns for name in measured[b][n].contestants()
        )
        header = [f"{b} {n:,}" for b, n in columns]
        header += [f"MiB, {b} {max(measured[b]):,}" for b in measured]
        lines = []
        for name in names:
            cells = [number(measured[b], name, n, "seconds", 1e3) for b, n in columns]
            cells += [
                number(found, name, max(found), "memory_bytes", 2**-20)
                for found in measured.values()
            ]
            lines.append([name, *cells])
        tables.append(f"{title}:\n\n" + markdown(["layer", *header], lines))
    for backend, names in machines.items():
        tables.append(f"Machine of {backend}: {', '.join(sorted(names))}.")
    return "\n\n".join(tables) or "Not measured."


MODES = {
    "train": "Milliseconds of a training step",
    "decode": "Milliseconds of a generated token",
}


def number(found, name, length, field, factor):
    """A cell: a field of a layer's record at a length, times a factor."""
    records = [r for r in found[length].of(name) if r.length == length]
    if not records:
        return "-"
    (record,) = records
    value = getattr(record, field)
    if value is None:
        return record.status
    value *= factor
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def cell(row, part, path, digits, factor):
    """A cell: mean and deviation over the seeds of the value below these keys."""
    values = [factor * at(result, path) for result in row.get(part, [])]
    if not values:
        return "-"
    return f"{values[0]:,}" if digits is None else mean_and_spread(values, digits)


def yes(condition):
    return "yes" if condition else "no"


def bits(row, length):
    """Mean bits per byte; infinite without runs."""
    values = [x["bits_per_byte"][str(length)] for x in row.get("language", [])]
    return statistics.fmean(values) if values else math.inf


def relative(name, costs, mode, field, backend=BACKEND):
    """A field of the layer at `COST_LENGTH`, softmax being 1; `None` if not measured.

    Of layers in turn, the mean.
    """
    comparison = costs.get((mode, backend), {}).get(COST_LENGTH)
    if comparison is None:
        return None
    values = [
        comparison.series(layer, field).get(COST_LENGTH)
        for layer in [*CANDIDATES[name].layers, "softmax"]
    ]
    if None in values:
        return None
    *own, softmax = values
    return statistics.fmean(own) / softmax


@functools.cache
def facts(name):
    """What a candidate's layers say of themselves.

    Returns:
        Dict of `bytes`, of the state of a model of language after `LONG` positions;
        `streams`, the kind of that state; and `replaces`, whether the layers, with
        these options, compute or estimate softmax attention with its trained weights.
    """
    import keras

    from keras_efficient_attn.layers import get_attention
    from verdict.language import SIZES

    names = CANDIDATES[name].layers
    sizes = {"num_heads": SIZES["heads"], "key_dim": SIZES["dim"] // SIZES["heads"]}
    layers = [get_attention(each, **sizes) for each in names]
    size = 0
    for layer in layers:
        shape = (1, LONG, SIZES["dim"])
        layer.build(shape, shape)
        state = layer.get_initial_state(1, LONG if layer.state_grows else None)
        size += sum(keras.ops.convert_to_numpy(x).nbytes for x in state.values())
    replaces = all(
        layer.is_softmax
        or (layer.estimates_softmax and layer.conversion_refusal({}) is None)
        for layer in layers
    )
    grows = any(layer.state_grows for layer in layers)
    return {
        "bytes": size * SIZES["layers"] // len(layers),
        "streams": "a growing cache" if grows else "a constant state",
        "replaces": replaces,
    }


def draw(rows, costs, path):
    """The picture: bits per byte at `LONG` over the time of a training step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = {
        name: (relative(name, costs, "train", "seconds"), bits(row, LONG))
        for (name, convolution), row in rows.items()
        if convolution
    }
    points = {n: (x, y) for n, (x, y) in points.items() if x and y < math.inf}
    # Beside so many points, names would cover each other: a list has them.
    best_first = sorted(points.items(), key=lambda point: point[1][1])
    for number, (name, (x, y)) in enumerate(best_first, 1):
        color = GREY if name == "softmax" else BLUE
        label = f"{number}  {name}"
        marker = dict(color=color, markersize=12, markeredgecolor="white")
        axes.plot(x, y, "o", label=label, **marker)
        style = dict(ha="center", va="center", color="white", fontsize=7)
        axes.annotate(str(number), (x, y), **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    shares, numbers = [0.03, 0.1, 0.3, 1], [2, 2.5, 3, 4, 5, 6]
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.set_yticks(numbers, [f"{number:g}" for number in numbers])
    axes.minorticks_off()
    axes.margins(0.08)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
        handlelength=0,
        markerscale=0,
    )
    axes.set_xlabel(
        f"time of a training step at {COST_LENGTH:,} positions, softmax attention = 1"
    )
    axes.set_ylabel(f"bits per byte at {LONG:,} (fewer are better)")
    axes.grid(True, which="major", linewidth=0.3)
    figure.savefig(path, dpi=150)


def at(result, path):
    """The value below these keys."""
    for key in path:
        result = result[key]
    return result


if __name__ == "__main__":
    sys.exit(main())
