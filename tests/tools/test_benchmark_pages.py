"""The pages of benchmarks have the tables of the runs in the repository."""

import json

import pytest

from tools import benchmark_pages

pytestmark = pytest.mark.any_backend

PAGES = [path for path in benchmark_pages.PAGES if "<!-- run: " in path.read_text()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_runs(path):
    text = path.read_text()
    assert benchmark_pages.page(text) == text
    # Every row is in the file that its place names.
    for mark in benchmark_pages.PLACE.finditer(text):
        run = json.loads((benchmark_pages.ROOT / mark[2]).read_text())
        names = {record["contestant"] for record in run["records"]} - {"matmul"}
        rows = [line for line in mark[0].splitlines() if line.startswith("| `")]
        assert {row.split("`")[1] for row in rows} == names


def test_a_changed_table_is_written_again():
    (path,) = (p for p in PAGES if p.name == "accelerators.md")
    text = path.read_text()
    changed = text.replace("| `gated-delta` |", "| `x` |", 1)
    assert changed != text
    assert benchmark_pages.page(changed) == text
