import numpy as np
import pytest

import reformer_duplication
from duplication import training
from duplication.training import Sequences
from tests.autodiff import to_numpy

pytestmark = pytest.mark.any_backend


def test_sequences_repeat_their_first_half():
    data = Sequences(steps=3, batch=4, length=10, symbols=5, seed=1)
    x, y, weights = data[2]
    whole = np.concatenate([x, y[:, -1:]], axis=1)
    np.testing.assert_array_equal(whole[:, :5], whole[:, 5:])
    assert np.all(whole[:, 0] == 0) and set(np.unique(whole[:, 1:5])) <= set(
        range(1, 6)
    )
    # The score covers exactly the copy.
    np.testing.assert_array_equal(weights, np.tile(np.arange(9) > 4, (4, 1)))
    np.testing.assert_array_equal(y[weights == 1].reshape(4, 4), x[:, 1:5])
    np.testing.assert_array_equal(data[2][0], x)
    assert np.any(data[1][0] != x)


def test_the_script_prints_its_table(printed_table):
    arguments = (
        "--train 2 --evaluate full 1 9 --aligned yes no --seeds 0 1 --length 12 "
        "--symbols 3 --bucket-size 4 --buckets 2 --dim 8 --heads 2 --steps 2 --batch 2 "
        "--test-sequences 4 --verbose 0"
    )
    assert reformer_duplication.main(arguments.split()) == 0
    header, *rows = printed_table()
    assert header == ["trained", "aligned", "full", "LSH-1", "LSH-9"]
    for row, aligned in zip(rows, ("yes", "no"), strict=True):
        name, kind, *cells = row
        assert (name, kind) == ("LSH-2", aligned)
        assert ["(0.8)" in cells[0], "(86.8)" in cells[1], "(" in cells[2]] == [
            True,
            True,
            False,
        ]
        assert all(0 <= float(cell.split()[0]) <= 100 for cell in cells)


@pytest.mark.parametrize("aligned", [True, False])
def test_chunks_begin_with_buckets_or_run_on(aligned):
    arguments = reformer_duplication.parse_arguments(
        "--length 12 --symbols 3 --bucket-size 2 --buckets 4 --dim 8 --heads 2".split()
    )
    model = training.build_model(1, aligned, 0, arguments)
    x = np.random.default_rng(0).integers(1, 4, (8, 11)).astype("int32")
    changed = x.copy()
    changed[:, 7:] = 0
    before = [to_numpy(model(tokens))[:, :7] for tokens in (x, changed)]
    # Chunks that run on change with later positions.
    assert np.array_equal(*before) == aligned


def test_all_steps_are_trained_and_any_number_of_rounds_is_evaluated(monkeypatch):
    models, build_model = [], training.build_model

    def read_log(*arguments):
        models.append(build_model(*arguments))
        return models[-1]

    monkeypatch.setattr(training, "build_model", read_log)
    arguments = (
        "--train 10 2 --evaluate 2 --length 4 --symbols 3 --bucket-size 2 --buckets 2 "
        "--dim 2 --heads 1 --steps 101 --batch 1 --test-sequences 1 --verbose 0"
    )
    arguments = reformer_duplication.parse_arguments(arguments.split())
    assert set(training.accuracies(10, True, 0, arguments)) == {2}
    assert int(models[0].optimizer.iterations) == 101


@pytest.mark.parametrize(
    "arguments",
    ["--length 7", "--buckets 3", "--dim 6 --heads 4", "--train some", "--steps 0"],
)
def test_wrong_arguments_are_one_line(arguments, error_line):
    assert error_line(reformer_duplication, arguments.split())
