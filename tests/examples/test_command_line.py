"""What the command lines of all scripts have in common."""

import pytest

import associative_recall
import distill_byte_lm
import rl_memory
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
