"""Writes the tables of the pages in `docs/benchmarks` whose runs lie in the repository.

    python -m tools.benchmark_pages

A place `<!-- run: FILE -->` … `<!-- end -->` of a page gets the table of a file that
`python -m keras_efficient_attn.benchmark --save FILE`, a script of `examples` or
`research` with `--save FILE`, or `tools.compile_for_tpu` wrote.
"""

import json
import re
import shlex
import textwrap
from pathlib import Path

from keras_efficient_attn.benchmark.records import Record
from keras_efficient_attn.benchmark.report import format_number
from keras_efficient_attn.benchmark.settings import MATMUL, Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
PLACE = re.compile(r"(<!-- run: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
UNITS = {"forward": "forward", "train": "a training step", "decode": "a token"}


def page(text):
    """The text of a page, with the tables of now."""

    def fill(place):
        # Not by `read_json`, which makes the layers, of packages that may be missing.
        run = json.loads((ROOT / place[2]).read_text())
        about = run["environment"]
        if "header" in run:
            return "\n".join([place[1], *results_table(run, about), "", place[3]])
        records = [Record(**record) for record in run["records"]]
        records = [record for record in records if record.contestant != MATMUL]
        settings = run["settings"]
        if "target" in about:
            lines = estimates_table(records, about)
        else:
            lines = times_table(records, about, settings)
        return "\n".join([place[1], *lines, "", place[3]])

    return PLACE.sub(fill, text)


def results_table(run, about):
    """Lines of Markdown: the table that a script printed."""
    yield f"{machine(about)}:"
    words = shlex.join(run["command"])
    if "--backend" not in run["command"]:
        words = f"KERAS_BACKEND={about['backend']} {words}"
    yield from ("", "```bash", *wrapped(words), "```", "")
    yield f"| {' | '.join(run['header'])} |"
    yield "|---" * len(run["header"]) + "|"
    for row in run["rows"]:
        yield f"| {' | '.join(row)} |"


def machine(about):
    """A backend, Keras, the processor and the date."""
    cores = "1 core" if about["cpu_count"] == 1 else f"{about['cpu_count']} cores"
    return (
        f"{about['backend']} {about['backend_version']}, Keras {about['keras']}, "
        f"{cores} of {about['cpu']}, {about['date']}"
    )


def estimates_table(records, about):
    """Lines of Markdown: what a TPU's compiler expects at one length."""
    split = about.get("devices")
    chips = f", {split[0]} × {split[1]} chips (rows × heads)" if split else ""
    yield (
        f"{about['target']}{chips}, libtpu {about['libtpu']}, JAX {about['jax']}, "
        f"Keras {about['keras']}, {about['date']}; the fastest first."
    )
    yield from ("", "| layer | ms | of the peak | MiB |", "|---|---|---|---|")
    for record in sorted(records, key=lambda record: record.seconds):
        cells = (
            milliseconds(record),
            format_number(record.peak_share, ".0%"),
            mebibytes(record),
        )
        yield f"| `{record.contestant}` | {' | '.join(cells)} |"


def times_table(records, about, settings):
    """Lines of Markdown: milliseconds by length, and memory at the longest."""
    yield (
        f"Milliseconds of {UNITS[settings['mode']]}"
        f"{', causal' if settings['causal'] else ''}; batch {settings['batch']}, "
        f"{settings['heads']} heads of {settings['head_dim']}, {settings['dtype']}. "
        f"{machine(about)}; medians of {settings['repeats']} in turns:"
    )
    yield from ("", "```bash", *command(settings), "```")
    lengths = settings["lengths"]
    header = ["layer", *(f"{n:,}" for n in lengths), f"MiB at {lengths[-1]:,}"]
    yield from ("", f"| {' | '.join(header)} |", "|---" * len(header) + "|")
    for name in dict.fromkeys(record.contestant for record in records):
        own = {r.length: r for r in records if r.contestant == name}
        cells = [milliseconds(own[n]) for n in lengths]
        cells.append(mebibytes(own[lengths[-1]]))
        yield f"| `{name}` | {' | '.join(cells)} |"


def command(settings):
    """Lines of the benchmark command with these settings."""
    flags = [f"--{name}" for name in ("causal", "model") if settings[name]]
    options = [
        f"--{name.replace('_', '-')} {settings[name]}"
        for name in ("backend", "mode", "heads", "head_dim", "repeats", "time_limit")
    ]
    options += [
        f"--{name} {settings[name]}"
        for name in ("batch", "dtype")
        if settings[name] != getattr(Settings, name)
    ]
    options += [
        f"--{name} {' '.join(map(str, settings[name]))}"
        for name in ("lengths", "layers")
    ]
    return wrapped(
        " ".join(["python -m keras_efficient_attn.benchmark", *flags, *options])
    )


def wrapped(words):
    """Lines of a command, all but the last with a backslash."""
    lines = textwrap.wrap(words, 84, break_long_words=False, break_on_hyphens=False)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def milliseconds(record):
    if record.seconds is None:
        return record.status
    return format_number(record.seconds * 1e3, ".3g")


def mebibytes(record):
    if record.memory_bytes is None:
        return "-"
    return format_number(record.memory_bytes / 2**20, ",.0f")


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text()))
