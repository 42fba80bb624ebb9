"""What the command lines of all scripts have in common."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import associative_recall
import distill_byte_lm
import image_classification
import rl_memory
import tables
import word_lm

pytestmark = pytest.mark.any_backend


@pytest.mark.parametrize(
    ("script", "option", "contents"),
    [
        (associative_recall, "--out", ""),
        (associative_recall, "--plot", "/plot.png"),
        (associative_recall, "--save", "/table.json"),
        (distill_byte_lm, "--out", ""),
        (distill_byte_lm, "--teacher", ""),
        (rl_memory, "--save", "/table.json"),
        (word_lm, "--save", "/table.json"),
    ],
)
def test_folders_that_cannot_be_made_are_those_of_their_option(
    script, option, contents, tmp_path, error_line
):
    file = tmp_path / "file"
    file.touch()
    # The script's other folders can be made.
    arguments = ["--out", str(tmp_path / "out")] if script is not word_lm else []
    if script is distill_byte_lm:
        arguments += ["--teacher", str(tmp_path / "teacher")]
    arguments += [option, f"{file}/folder{contents}"]
    assert f" {option}: folder {file}/folder: " in error_line(script, arguments)


@pytest.mark.parametrize("save", [["--save", "./t.json"], ["--save=.//t.json"]])
def test_a_saved_table_has_the_command_without_its_file(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = SimpleNamespace(
        save=Path("t.json"), command=["examples/a.py", "--out", "t.json", *save, "-v"]
    )
    tables.show(["a"], [[1]], arguments)
    saved = json.loads(Path("t.json").read_text())["command"]
    assert saved == ["python", "examples/a.py", "--out", "t.json", "-v"]


@pytest.mark.parametrize("script", [image_classification, word_lm])
@pytest.mark.parametrize("rate", ["1.5", "1", "-0.1", "x"])
def test_a_rate_of_dropout_is_below_one(script, rate, error_line):
    message = f"--dropout: must be a number from 0 to below 1; received {rate!r}"
    assert message in error_line(script, ["--dropout", rate])
