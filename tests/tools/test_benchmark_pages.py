"""The pages of benchmarks have the tables of the runs in the repository."""

import dataclasses
import json
import shlex

import pytest

from keras_efficient_attn.benchmark import cli
from keras_efficient_attn.benchmark.settings import Settings
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
        if "header" in run:
            cells = [row.strip("| ").split(" | ") for row in mark[0].splitlines()]
            assert [run["header"], *run["rows"]] == [
                row for row in cells if len(row) == len(run["header"]) > 1
            ]
            continue
        names = {record["contestant"] for record in run["records"]} - {"matmul"}
        rows = [line for line in mark[0].splitlines() if line.startswith("| `")]
        assert {row.split("`")[1] for row in rows} == names


@pytest.mark.parametrize("name", ["fourier-jax", "generation-torch"])
def test_the_command_of_a_page_has_the_settings_of_the_run(name):
    path = benchmark_pages.ROOT / "research" / "benchmarks" / f"{name}.json"
    settings = json.loads(path.read_text())["settings"]
    text = " ".join(benchmark_pages.command(settings)).replace("\\", "")
    words = shlex.split(text)
    assert words[:3] == ["python", "-m", "keras_efficient_attn.benchmark"]
    found = cli.parse_arguments(words[3:])
    for option in ("layers", "lengths", "mode", "model", "backend", "time_limit"):
        expected = settings[option]
        assert found[option] == expected or list(found[option]) == expected


def test_the_command_of_a_page_has_the_batch_and_type_of_the_run():
    settings = dataclasses.asdict(Settings(lengths=(8,), backend="jax"))
    assert "--batch" not in " ".join(benchmark_pages.command(settings))
    settings.update(batch=4, dtype="bfloat16")
    text = " ".join(benchmark_pages.command(settings)).replace("\\", "")
    found = cli.parse_arguments(shlex.split(text)[3:])
    assert (found["batch"], found["dtype"]) == (4, "bfloat16")
    assert (found["lengths"], tuple(found["layers"])) == ([8], settings["layers"])


def test_a_changed_table_is_written_again():
    (path,) = (p for p in PAGES if p.name == "accelerators.md")
    text = path.read_text()
    changed = text.replace("| `gated-delta` |", "| `x` |", 1)
    assert changed != text
    assert benchmark_pages.page(changed) == text
