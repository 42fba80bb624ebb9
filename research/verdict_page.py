"""Makes the table of `docs/choosing.md` from the runs of `verdict_run.py`.

    python research/verdict_page.py

A row for each candidate with results, with a convolution and without: means and
deviations over the seeds, of runs whose sizes and options are those of today. `-`
stands for what has not been measured, and for causal layers in tasks of both ways.
"""

import importlib
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

PAGE = folders.ROOT / "docs" / "choosing.md"
MARKED = re.compile(r"(<!-- verdict -->\n).*?(<!-- end -->)", re.DOTALL)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="the runs")
    add("--page", type=Path, default=PAGE, help="with the marked place of the table")
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Writes the table into the page."""
    rows = collect(arguments.results)
    page = arguments.page.read_text()
    if not MARKED.search(page) or not rows:
        raise UsageError(
            f"--page {arguments.page} must have the marks of the table, and --results "
            f"{arguments.results} a run"
        )
    arguments.page.write_text(MARKED.sub(rf"\g<1>{table(rows)}\n\g<2>", page))


def collect(folder):
    """The results of each candidate, with a convolution and without.

    Returns:
        Dict from `(candidate, convolution)` to a dict of the list of results over the
        seeds of each part, by the bits per byte at the length of training.
    """
    found = defaultdict(lambda: defaultdict(list))
    for part in PARTS:
        module = importlib.import_module(f"verdict.{part}")
        for record in read(folder, part):
            key = record["candidate"], record["convolution"]
            own = module.options(CANDIDATES[key[0]], key[1])
            if (record["sizes"], record["options"]) == (module.SIZES, own):
                found[key][part].append(record["result"])
    return dict(sorted(found.items(), key=lambda row: first_bits(row[1])))


def first_bits(row):
    """Mean bits per byte at the length of training; infinite without runs."""
    bits = [x["bits_per_byte"]["1024"] for x in row.get("language", [])]
    return statistics.fmean(bits) if bits else float("inf")


COLUMNS = {
    "bits per byte at 1,024": ("language", ("bits_per_byte", "1024"), 3, 1),
    "at 4,096": ("language", ("bits_per_byte", "4096"), 3, 1),
    "at 16,384": ("language", ("bits_per_byte", "16384"), 3, 1),
    "recall of 20 pairs, %": ("recall", ("recall", "accuracy", "20"), 1, 100),
    "later, %": ("recall", ("long_recall", "accuracy", "20"), 1, 100),
    "bytes of state there": ("recall", ("recall", "state_bytes"), 0, 1),
    "parity at 8 times, %": ("recall", ("parity", "accuracy", "256"), 1, 100),
    "permutations, %": ("recall", ("permutations", "accuracy", "256"), 1, 100),
    "bits per hidden byte at 256": ("both_ways", ("bits_per_byte", "256"), 3, 1),
    "hidden, at 1,024": ("both_ways", ("bits_per_byte", "1024"), 3, 1),
    "ListOps, %": ("classes", ("listops", "accuracy"), 1, 100),
    "packages, %": ("classes", ("packages", "accuracy"), 1, 100),
}


def table(rows):
    """The Markdown table, without columns of parts that have no run."""
    columns = {
        title: column
        for title, column in COLUMNS.items()
        if any(row.get(column[0]) for row in rows.values())
    }
    lines = []
    for (name, convolution), row in rows.items():
        cells = [name, "yes" if convolution else "no"]
        cells.append("always" if CANDIDATES[name].causal_only else "optional")
        for part, path, digits, factor in columns.values():
            values = [factor * at(result, path) for result in row.get(part, [])]
            cells.append(mean_and_spread(values, digits) if values else "-")
        cells.append(min(map(len, row.values())))
        lines.append(cells)
    header = ["attention", "convolution", "causal", *columns, "seeds"]
    return markdown(header, lines)


def at(result, path):
    """The value below these keys."""
    for key in path:
        result = result[key]
    return result


if __name__ == "__main__":
    sys.exit(main())
