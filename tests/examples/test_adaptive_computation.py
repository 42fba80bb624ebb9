import re

import numpy as np
import pytest

import adaptive_computation
from pondering.tasks import BLANK, addition, parity

pytestmark = pytest.mark.any_backend


def test_parity_counts_the_ones():
    task = parity(200, 6, seed=1)
    assert set(np.unique(task.difficulty)) == set(range(1, 7))
    for x, y, difficulty in zip(task.x, task.y, task.difficulty, strict=True):
        assert set(x[0, : difficulty[0]]) <= {-1, 1}
        assert (x[0, difficulty[0] :] == 0).all()
        assert list(x[0]).count(1) % 2 == y[0, 0]


def test_addition_adds():
    task = addition(100, 3, seed=1)
    lengths = set()
    for x, y, difficulty in zip(task.x, task.y, task.difficulty, strict=True):
        total = 0
        for t in range(3):
            digits = x[t].reshape(3, 10)
            assert (digits.sum(-1) == (np.arange(3) < difficulty[t])).all()
            total += int(digits.argmax(-1) @ 10 ** np.arange(3))
            told = "".join(str(d) for d in y[t][::-1] if d != BLANK)
            assert told == str(total)
            lengths.add(difficulty[t])
    assert lengths == {1, 2, 3}
    np.testing.assert_array_equal(task.weight[0], [0, 1, 1])


def test_the_script_prints_its_table_and_leaves_a_picture(
    printed_table, tmp_path, capsys
):
    arguments = (
        "--tasks addition --ponder-cost 0.01 --size 2 --units 4 --max-steps 2 "
        "--steps 2 --batch 4 --test-sequences 40 --verbose 0 --seeds 0 1 "
        f"--out {tmp_path}"
    )
    assert adaptive_computation.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    _, *rows = printed_table(printed)
    assert [row[:2] for row in rows] == [
        ["addition", "without"],
        ["addition", "cost 0.01"],
    ]
    # Without pondering: one step each, for numbers of one digit and of two.
    assert rows[0][3] == "1.00 ± 0.00"
    assert re.fullmatch(r"1: 1\.00 \(\d+%\), 2: 1\.00 \(\d+%\)", rows[0][4])
    assert 1 <= float(rows[1][3].split()[0]) <= 2
    shares = [float(x) for x in re.findall(r"seed \d: ([\d.]+)% right", printed)]
    for row, seeds in zip(rows, np.reshape(shares, (2, 2)), strict=True):
        mean, deviation = (float(x) for x in row[2].split(" ± "))
        assert mean == pytest.approx(seeds.mean(), abs=0.11)
        assert deviation == pytest.approx(seeds.std(ddof=1), abs=0.15)
    assert (tmp_path / "steps.png").stat().st_size > 0


@pytest.mark.parametrize(
    "arguments", ["--steps 0", "--tasks some", "--ponder-cost -1", "--size 18"]
)
def test_wrong_arguments_are_one_line(arguments, error_line):
    assert error_line(adaptive_computation, arguments.split())
