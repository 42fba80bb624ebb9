"""The recall tasks' data, their runs, and resuming an interrupted sweep."""

import itertools
import json

import numpy as np
import pytest

import associative_recall
from associations import data, training

pytestmark = pytest.mark.any_backend

TINY = "--pairs 1 2 --length 12 --vocabulary 12 --dim 4 --steps 2 --batch 2 --seeds 0 1"


@pytest.mark.parametrize("writes", [1, 3])
def test_queries_ask_for_what_their_key_was_last_written_with(writes):
    rows, length, vocabulary, pairs = 20, 60, 50, 6
    tokens, targets, weights = data.associations(
        np.random.default_rng(0), rows, length, vocabulary, pairs, writes
    )
    for row in range(rows):
        latest, written, values, asked = {}, [], [], []
        for t in range(length):
            token = tokens[row, t]
            if t < 2 * pairs * writes:
                if t % 2:
                    values.append(token)
                    latest[written[-1]] = token
                else:
                    written.append(token)
                assert weights[row, t] == 0
            elif token != data.NOTHING:
                asked.append(token)
                assert targets[row, t] == latest[token]
                assert weights[row, t] == np.float32(1 / pairs)
            else:
                assert weights[row, t] == 0
        assert sorted(asked) == sorted(latest) and len(latest) == pairs
        assert sorted(written) == sorted(list(latest) * writes)
        assert all(0 < key < 25 for key in latest)
        assert len(set(values)) == len(values) and all(25 <= v < 50 for v in values)
    assert np.any(tokens[0] != tokens[1])


def test_queries_are_frequent_near_the_pairs():
    tokens, _, weights = data.associations(
        np.random.default_rng(0), 4000, 10, 12, pairs=1, writes=1
    )
    shares = weights.mean(0)[2:]
    expected = np.arange(1, 9.0) ** data.GAP_POWER
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)


def test_parity_is_that_of_the_ones_so_far():
    tokens, targets, weights = data.tracked(np.random.default_rng(0), 3, 50, "parity")
    assert set(np.unique(tokens)) == {0, 1}
    for row in range(3):
        for t in range(50):
            assert targets[row, t] == tokens[row, : t + 1].tolist().count(1) % 2


def test_permutations_reorder_three_things():
    tokens, targets, _ = data.tracked(np.random.default_rng(0), 3, 20, "permutations")
    orders = ["abc", "acb", "bac", "bca", "cab", "cba"]
    for row in range(3):
        things = "abc"
        for t in range(20):
            # The order says which of the things stands at each place next.
            places = ["abc".index(x) for x in orders[tokens[row, t]]]
            things = "".join(things[i] for i in places)
            assert orders[targets[row, t]] == things


def test_rows_of_parity_count_up_to_lengths_with_uniform_logarithms():
    _, _, weights = data.tracked(np.random.default_rng(0), 4000, 32, "parity")
    lengths = (weights > 0).sum(1)
    expected = (np.arange(32) < lengths[:, None]) / lengths[:, None]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    # Rounded: half of the ends belong to a length below.
    share = np.mean(lengths <= 5)
    assert share == pytest.approx(np.log(5.5) / np.log(32), abs=0.03)


def test_numbers_of_pairs_join_in_the_first_half_and_take_turns():
    arguments = associative_recall.parse_arguments([*TINY.split(), "--steps", "12"])
    batches = data.Batches(arguments, seed=3)
    counts = [int((batches[i][2] > 0).sum()) // 2 for i in range(len(batches))]
    assert counts == [1, 1, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    tokens = batches[5][0]["token_ids"]
    np.testing.assert_array_equal(tokens, batches[5][0]["token_ids"])
    assert np.any(tokens != data.Batches(arguments, seed=4)[5][0]["token_ids"])


@pytest.mark.parametrize(
    ("attention", "floats"),
    [
        # Keys and values of 12 positions.
        ("softmax", 12 * (4 + 4)),
        # Features by values, and the sum of the features.
        ("linear:feature_map=elu", 4 * 4 + 4),
        ("delta:convolution=None", 4 * 4),
        # A vector, a weight by feature: 15 of them, and a window.
        ("linear:feature_map=taylor,window=2", 15 * 5 + 2 * (4 + 4)),
    ],
)
def test_bytes_are_those_of_the_states(attention, floats):
    arguments = associative_recall.parse_arguments([*TINY.split(), "--layers", "2"])
    model = training.build_model(attention, 4, arguments)
    # Besides the floats some counters, masks and scales.
    assert 0 <= training.state_bytes(model, 12) - 2 * 4 * floats <= 2 * 4 * (12 + 2)


@pytest.fixture
def fake_runs(monkeypatch):
    """Fake runs without training, with different accuracies."""
    count = itertools.count(1)

    def run(attention, dim, learning_rate, seed, arguments):
        number = next(count)
        accuracy = {pairs: 1 / (pairs + number) for pairs in arguments.pairs}
        sizes = {"state_bytes": 1234 * dim, "parameters": 1}
        # The later, the worse in the test, and the better in validation.
        results = {"accuracy": accuracy, "validation": {1: number / 10}}
        return {**results, **sizes, "steps_taken": 7, "seconds": 0.5}

    monkeypatch.setattr(training, "run", run)


def table_of(output):
    """The last table's cells, as a dict from the contestant."""
    rows = [line for line in output.splitlines() if line.startswith("| ")]
    header = max(i for i, row in enumerate(rows) if row.startswith("| attention"))
    cells = [row.strip("| ").split(" | ") for row in rows[header:]]
    return {name: others for name, *others in cells if name != "---"}


def test_an_interrupted_sweep_goes_on(fake_runs, tmp_path, capsys):
    out, picture = tmp_path / "out", tmp_path / "plot.png"
    arguments = [*TINY.split(), "--out", str(out), "--plot", str(picture)]
    arguments += ["--task", "forgetting", "--attention"]
    assert associative_recall.main([*arguments, "softmax"]) == 0
    assert capsys.readouterr().out.count("seed ") == 2
    file = out / "runs.jsonl"
    first, second = file.read_text().splitlines()
    # As if the process had ended while writing the second run's line.
    file.write_text(f"{first}\n{second[:30]}")
    picture.unlink()
    assert associative_recall.main([*arguments, "softmax", "delta"]) == 0
    output = capsys.readouterr().out
    trained = [line.split(",")[0] for line in output.splitlines() if "seed" in line]
    assert trained == ["delta", "softmax", "delta"]
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert json.dumps(records[0]) == first and len(records) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = table_of(output)
    assert table["attention"] == ["width", "bytes", "rate", "pairs 1", "2"]
    for attention in ("softmax", "delta"):
        runs = [r for r in records if r["attention"] == attention]
        assert table[attention][:2] == ["4", f"{runs[0]['state_bytes']:,}"]
        for cell, pairs in zip(table[attention][3:], ("1", "2"), strict=True):
            a, b = (100 * run["accuracy"][pairs] for run in runs)
            assert cell == f"{(a + b) / 2:.1f} ± {abs(a - b) / 2**0.5:.1f}"


def test_training_stops_at_the_accuracy(tmp_path, capsys):
    arguments = (
        "--task parity --attention linear --length 2 --dim 4 --steps 3 --batch 2 "
        "--seeds 0 --validate-every 2 --test-sequences 4 --stop-at 1e-9 "
        f"--out {tmp_path}"
    )
    assert associative_recall.main(arguments.split()) == 0
    (record,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    assert record["steps_taken"] == 2
    table = table_of(capsys.readouterr().out)
    assert table["attention"][3:] == ["length 2", "4", "8", "16"]
    assert table["linear"][3:] == [
        f"{100 * value:.1f}" for value in record["accuracy"].values()
    ]


def test_the_rate_with_the_best_validation_counts(fake_runs, tmp_path, capsys):
    arguments = [*TINY.split(), "--attention", "softmax", "--out", str(tmp_path)]
    # For each seed, 0.1 comes before 0.2.
    assert associative_recall.main([*arguments, "--learning-rates", "0.1", "0.2"]) == 0
    assert table_of(capsys.readouterr().out)["softmax"] == [
        "4",
        "4,936",
        "0.2",
        f"{50 * (1 / 3 + 1 / 5):.1f} ± {100 * (1 / 3 - 1 / 5) / 2**0.5:.1f}",
        f"{50 * (1 / 4 + 1 / 6):.1f} ± {100 * (1 / 4 - 1 / 6) / 2**0.5:.1f}",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        "--task copy",
        "--task parity --pairs 4",
        "--task permutations --pairs 4",
        "--pairs 50",
        "--pairs 8 --vocabulary 16",
        "--dim 6 --heads 4",
        "--convolution 1",
        "--attention nothing --out OUT",
        "--out /dev/null/here",
    ],
)
def test_wrong_arguments_are_one_line(arguments, tmp_path, error_line):
    arguments = arguments.replace("OUT", str(tmp_path))
    assert error_line(associative_recall, arguments.split())
