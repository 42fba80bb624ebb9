import csv
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path

import keras
import pytest

import keras_efficient_attn
from keras_efficient_attn.benchmark import cli, settings
from keras_efficient_attn.benchmark.compare import run
from keras_efficient_attn.benchmark.execution import backend_module
from tests.benchmark.fakes import InProcessWorker

SMALL = "--heads 2 --head-dim 4 --lengths 8 --repeats 2 --causal".split()
FAVOR, UNSUPPORTED = "performer:num_features=16", "performer:feature_map=favor++"


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(
        cli, "run", functools.partial(run, start_worker=InProcessWorker)
    )
    monkeypatch.setattr(
        "keras_efficient_attn.benchmark.workloads.MATMUL_SIZES",
        {"cpu": 16, "accelerator": 16},
    )


def test_a_run_is_compared_with_an_earlier_one(in_process, tmp_path, capsys):
    file = tmp_path / "runs" / "before.json"
    arguments = [*SMALL, "--layers", "softmax", FAVOR]
    assert cli.main([*arguments, "--save", str(file)]) == 0
    content = json.loads(file.read_text())
    seconds = {record["contestant"]: record for record in content["records"]}
    # As on a machine of half the speed, where FAVOR+ was a thousand times as fast.
    for name, factor in (("matmul", 2.0), ("softmax", 1e6), (FAVOR, 2e-3)):
        seconds[name]["seconds"] *= factor
        seconds[name]["tokens_per_second"] /= factor
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert cli.main([*arguments, "--against", str(file)]) == 0
    printed = capsys.readouterr().out.split("slower than before")[1]
    (line,) = printed.strip().splitlines()[1:]
    name, length, ratio = line.split()
    assert (name, length) == (FAVOR, "8") and float(ratio) > 10
    # Another shape, and no file of the command.
    assert cli.main([*arguments, "--heads", "4", "--against", str(file)]) == 2
    assert "same heads. Received: 4 in this run, 2" in capsys.readouterr().err
    file.write_text("{}")
    assert cli.main([*arguments, "--against", str(file)]) == 2
    assert "is not a file that this command wrote" in capsys.readouterr().err


def test_a_run_leaves_table_files_and_pictures(in_process, tmp_path, capsys):
    layers = ["softmax", FAVOR, UNSUPPORTED]
    out = tmp_path / "new" / "folder"
    assert cli.main([*SMALL, "--layers", *layers, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    with open(out / "benchmark.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    content = json.loads((out / "benchmark.json").read_text())
    names = ["matmul", *layers]
    assert [(row["contestant"], row["length"]) for row in rows] == [
        (name, "8") for name in names
    ]
    for row, record in zip(rows, content["records"], strict=True):
        assert row.keys() == record.keys()
        for name, value in record.items():
            assert row[name] == ("" if value is None else str(value))
        assert row["backend"] == keras.backend.backend()
        if row["contestant"] == UNSUPPORTED:
            assert row["status"] == "unsupported" and row["seconds"] == ""
            assert "has no causal form" in row["detail"]
        else:
            assert row["status"] == "ok"
            low, median, high = (
                float(row[name]) for name in ("seconds_low", "seconds", "seconds_high")
            )
            assert 0 < low <= median <= high
        assert bool(row["error"]) == (row["contestant"] == FAVOR)
        assert bool(row["peak_share"]) == (row["status"] == "ok")
    assert content["settings"]["lengths"] == [8]
    assert content["settings"]["head_dim"] == 4 and content["settings"]["causal"]
    assert [item["contestant"] for item in content["summaries"]] == layers
    assert content["environment"]["backend"] == keras.backend.backend()
    # A call this small may fit into memory that the process already has.
    drawable = [
        record for record in content["records"] if record["contestant"] in layers
    ]
    measured = {"time.png": "seconds", "memory.png": "memory_bytes"}
    for name, field in measured.items():
        drawn = any(record[field] for record in drawable)
        assert (name in printed) == (out / name).exists() == drawn
    assert "unsupported" in printed and "faster than softmax from" in printed


@pytest.mark.parametrize("mode", [["--mode", "decode"], ["--mode", "train", "--model"]])
def test_other_modes(in_process, capsys, mode):
    assert cli.main([*SMALL, *mode, "--layers", "softmax"]) == 0
    printed = capsys.readouterr().out
    assert "unsupported" not in printed and "failed" not in printed
    assert mode[1] in printed


def test_pictures_need_matplotlib_and_nothing_else_does(
    in_process, tmp_path, capsys, monkeypatch
):
    for module in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    arguments = [*SMALL, "--layers", "softmax", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert "No pictures: matplotlib is not installed." in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        "benchmark.csv",
        "benchmark.json",
    }


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layers", "sofmax"], "sofmax"),
        (["--layers", "performer:features=3"], "no option 'features'"),
        (["--layers", "softmax", "softmax"], "differ"),
        (["--lengths", "12", "x"], "'x'"),
        (["--lengths"], "--lengths"),
        (["--heads", "0"], "--heads"),
        (["--dtype", "int8"], "int8"),
        (["--mode", "fast"], "fast"),
        (["--backend", "theano"], "theano"),
        (["--repeats", "-1"], "--repeats"),
        (["--time-limit", "0"], "--time-limit"),
        (["--out", __file__], f"--out: folder {__file__}: "),
        (["--save", f"{__file__}/a.json"], f"--save: folder {__file__}: "),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_arguments_get_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and message in captured.err


def test_the_language_model_without_keras_hub_gets_one_line(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        settings.importlib.util,
        "find_spec",
        lambda name: None if name == "keras_hub" else found(name),
    )
    assert cli.main(["--model"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "keras-efficient-attn[hub]" in error


def test_a_backend_that_is_absent_gets_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["--backend", "jax"]) == 2
    assert capsys.readouterr().err.endswith("jax is not installed\n")


def test_the_package_does_not_import_the_benchmark():
    root = Path(keras_efficient_attn.__file__).parent
    for path in set(root.rglob("*.py")) - set((root / "benchmark").rglob("*.py")):
        imports = re.findall(r"^\s*(?:from|import) .*", path.read_text(), re.MULTILINE)
        assert not [line for line in imports if "benchmark" in line], path


def test_the_device_has_words():
    assert backend_module().device()
