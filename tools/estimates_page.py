"""Writes the table of `tpu_estimates.json` into the page of accelerators.

python -m tools.estimates_page
"""

import re
from pathlib import Path

from keras_efficient_attn.benchmark.report import format_number, read_json

ROOT = Path(__file__).resolve().parent.parent
ESTIMATES = ROOT / "tools" / "tpu_estimates.json"
PAGE = ROOT / "docs" / "benchmarks" / "accelerators.md"
PLACE = re.compile(r"(<!-- estimates -->\n).*?(<!-- end -->)", re.DOTALL)


def table():
    """The table as lines of Markdown, with what the estimates depend on above it."""
    comparison = read_json(ESTIMATES)
    about = comparison.environment
    lines = [
        f"{about['target']}, libtpu {about['libtpu']}, JAX {about['jax']}, Keras "
        f"{about['keras']}, {about['date']}; the fastest first.",
        "",
        "| layer | ms | of the peak | MiB |",
        "|---|---|---|---|",
    ]
    for record in sorted(comparison.records, key=lambda record: record.seconds):
        lines.append(
            f"| `{record.contestant}` | {format_number(record.seconds * 1e3, '.3g')} | "
            f"{format_number(record.peak_share, '.0%')} | "
            f"{format_number(record.memory_bytes / 2**20, ',.0f')} |"
        )
    return "\n".join(lines) + "\n"


def page(text):
    """The text of the page, with the table of now."""
    return PLACE.sub(lambda place: f"{place[1]}\n{table()}\n{place[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
