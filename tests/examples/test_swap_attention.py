import json

import keras_hub
import numpy as np
import pytest

import swap_attention
from keras_efficient_attn import LocalAttention
from tests.models.conversion import families

# The first timed length exceeds the model's positions; the second would take too long.
TINY = (
    "--length 16 --batch 4 --calibration 1 --test 1 --train-steps 2 --steps 2 "
    "--lengths 24 48 --time-limit 1e-9 --verbose 0"
).split()
# Windows as long as the texts are exact.
EXACT, NARROW, COARSE = "local:window=16", "local:window=1", "vq:window=1,num_codes=2"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Text, and a fast original."""
    text = tmp_path / "text"
    text.write_text("".join(f"{i} sheep, " for i in range(500)))
    from swapping import original

    sizes = dict(num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8)
    monkeypatch.setattr(original, "SIZES", sizes)
    return ["--text", str(text), *TINY]


def print_report(capsys):
    """Lists of cells of all lines, by their first word."""
    rows = {}
    for line in filter(str.split, capsys.readouterr().out.splitlines()):
        name, *cells = line.split()
        rows.setdefault(name, []).append(cells)
    return rows


@pytest.mark.any_backend
def test_from_training_to_a_preset(small, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    table = tmp_path / "tables" / "table.json"
    arguments = [*small, "--attention", EXACT, "--out", str(out)]
    assert swap_attention.main([*arguments, "--save", str(table)]) == 0
    rows = print_report(capsys)
    saved = json.loads(table.read_text())
    script = "examples/swap_attention.py"
    assert saved["command"] == ["python", script, *arguments]
    exact, distilled = saved["rows"]
    # With windows as long as the texts, it is exact.
    assert exact[:6] == [EXACT, "1.0000", "1.0000", "-", "-", "all"]
    assert distilled[0] == f"{EXACT}, distilled" and float(distilled[2]) > 0.9
    (cells,) = rows["24"]
    softmax, _, swapped, _, faster = map(float, cells)
    # Times are rounded to tenths of a millisecond, so they may be zero.
    least, most = (softmax - 0.06) / (swapped + 0.06), (softmax + 0.06) / 0.04
    if swapped > 0.1:
        most = (softmax + 0.06) / (swapped - 0.06)
    assert least - 0.01 <= faster <= most + 0.01
    assert rows["48"] == [["-"] * 5]
    assert [cells[1] for cells in rows["-"]] == ["softmax:", "swapped:"]
    assert (out / "paths.png").exists()
    paths = json.loads((out / "paths.json").read_text())
    # A window is the only path that it has.
    assert [list(found) for found in paths.values()] == [["as it is"]] * 2
    loaded = keras_hub.models.Backbone.from_preset(str(out / "preset"))
    found = families.efficient_layers(loaded)
    assert [type(v) for v in found] == [LocalAttention]
    assert [v.window for v in found] == [16]

    # Existing files stay.
    assert swap_attention.main(arguments) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.any_backend
def test_of_a_preset_what_is_left_is_measured(small, tmp_path, printed_table, capsys):
    backbone = families.make("bert")
    tokenizer = keras_hub.models.BertTokenizer(
        vocabulary=[
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            "sheep",
            *"0123456789,",
        ]
    )
    preset = str(tmp_path / "preset")
    keras_hub.models.BertTextClassifierPreprocessor(
        tokenizer, sequence_length=16
    ).save_to_preset(preset)
    backbone.save_to_preset(preset)
    arguments = [*small, "--preset", preset, "--steps", "0", "--lengths"]
    swaps = [EXACT, COARSE, NARROW]
    arguments += ["--attention", *swaps, "--out", str(tmp_path / "out")]
    arguments += ["--compare-length", "24"]
    assert swap_attention.main(arguments) == 0
    printed = capsys.readouterr().out
    header, softmax, *found = printed_table(printed)
    rows = {name: cells for name, *cells in found}
    assert list(rows) == swaps
    # The report of the exact swap.
    assert any(
        line.split()[:1] == ["0"] and line.split()[-2:] == ["0.00%", "0.00%"]
        for line in printed.splitlines()
    )
    assert "distilled" not in printed
    assert rows[EXACT][:4] == ["1.0000", "1.0000", "-", "-"]
    assert 0 < float(rows[COARSE][1]) <= float(rows[COARSE][0]) < 0.999
    # The window alone is what a layer of that window alone gives.
    assert rows[COARSE][2] == rows[NARROW][0] != rows[COARSE][0]
    assert rows[COARSE][3] not in (rows[COARSE][0], rows[COARSE][2])
    assert header[-2:] == ["ms of 24 tokens", "of softmax"]
    assert softmax[:2] == ["softmax", "1"] and softmax[-1] == "1.00"
    # Each swap's time at 24 tokens, more than the model's positions, and its cosine.
    points = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    for name in swaps:
        cosine, *_, milliseconds, share = (cell.strip("-") for cell in rows[name])
        measured = float(share), float(cosine)
        np.testing.assert_allclose(points[name], measured, atol=0.006)
        # Both times are rounded to whole milliseconds.
        own, other = float(milliseconds), float(softmax[-2])
        assert (own - 0.5) / (other + 0.5) <= measured[0] + 0.005
        assert (own + 0.5) / max(other - 0.5, 1e-3) >= measured[0] - 0.005
    assert (tmp_path / "out" / "accuracy.png").exists()
    # The preset includes the tokenizer.
    saved = str(tmp_path / "out" / "preset")
    again = keras_hub.models.TextClassifierPreprocessor.from_preset(saved)
    assert type(again) is keras_hub.models.BertTextClassifierPreprocessor
    assert again.tokenizer.vocabulary_size() == tokenizer.vocabulary_size()


def test_what_is_foretold_of_longer_texts():
    from swapping.cost import predict

    for linear, square in ((3.0, 2.0), (3.0, 0.0), (0.0, 2.0)):
        points = [(n, linear * n + square * n**2) for n in (4, 8, 16)]
        expected = linear * 64 + square * 64**2
        assert predict(points, 64, quadratic=False) == pytest.approx(expected)
        # A bound for quadratic growth.
        assert predict(points, 64, quadratic=True) >= expected * (1 - 1e-9)
        assert predict(points[:1], 64, quadratic=True) >= expected * (1 - 1e-9)
    assert predict([(4, 100.0)], 16, quadratic=True) == pytest.approx(1600.0)
    # One point does not determine the growth.
    assert predict([(4, 100.0)], 16, quadratic=False) == pytest.approx(400.0)
    # Nothing grows slower than the length, or faster than its square.
    assert predict([(4, 100.0), (8, 100.0)], 16, False) == pytest.approx(200.0)
    assert predict([(4, 1.0), (8, 100.0)], 16, False) == pytest.approx(400.0)


def test_a_length_that_memory_may_not_hold_is_left_out(monkeypatch):
    from swapping import cost

    monkeypatch.setattr(cost, "free_memory", lambda: 100.0 * cost.MIB)
    found = cost.History(quadratic=True)
    found.add(8, 1e-3, 10.0 * cost.MIB)
    assert not found.leave_out(16, time_limit=1.0)
    assert found.leave_out(24, time_limit=1.0)
    assert "about 90 MiB at length 24" in found.reason
    assert "100 MiB that are free" in found.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "/nowhere"], "--preset /nowhere"),
        (["--layers", "0", "--budget", "0.1"], "give one of them"),
        (["--text", "/nowhere"], "no such file"),
        (["--steps", "-1"], "not negative; received '-1'"),
        (["--window-dropout", "2"], "a number from 0 to 1; received '2'"),
    ],
)
def test_errors_are_one_line(tmp_path, error_line, arguments, message):
    arguments = ["--out", str(tmp_path / "out"), *arguments]
    assert message in error_line(swap_attention, arguments)
