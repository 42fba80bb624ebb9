"""Choices of layers and windows, compared by the script."""

import pytest

import compare_choices
import distill_byte_lm

pytestmark = pytest.mark.any_backend
TEACHER = (
    "--length 16 --dim 16 --heads 2 --layers 2 --batch 2 --steps 2 --verbose 0 "
    "--only-teacher"
).split()


def test_both_choices_of_a_teacher(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(3000)))
    folders = ["--text", str(text), "--teacher", str(tmp_path / "teacher")]
    out = ["--out", str(tmp_path / "out")]
    assert distill_byte_lm.main([*TEACHER, *folders, *out]) == 0
    capsys.readouterr()
    arguments = "--length 16 --batch 2 --window-budgets 16".split()
    arguments += [*folders, "--attention", "local:window=1"]
    assert compare_choices.main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if line}
    layers, other, first, second = rows["1"]
    assert {layers, other} <= {"0", "1"}
    assert float(first) > 0 and (layers != other or first == second)
    # Windows as long as the texts leave the output as it is.
    choices = [line for line in lines if line[:1] == ["by"]]
    assert [line[1] for line in choices] == ["layers", "output"]
    assert all(line[2:4] == ["16", "16"] for line in choices)
    assert all(abs(float(line[4])) < 1e-6 for line in choices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --preset or --teacher is needed"),
        (["--teacher", "/nowhere"], "has no teacher.keras"),
    ],
)
def test_errors_are_one_line(error_line, arguments, message):
    assert message in error_line(compare_choices, arguments)
