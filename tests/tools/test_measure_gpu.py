"""`make gpu`: what it measures, in which order, and what it does with failures."""

import importlib.util
import json
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from keras_efficient_attn.benchmark.worker_process import WorkerDied, WorkerTimeout
from tests.autodiff import to_numpy
from tests.benchmark.fakes import STEPS, FakeClock, FakeWorker
from tests.ops.test_gated_attention import recurrence
from tools import measure_gpu
from tools.measure_gpu import BACKENDS, DRY, FULL, Workers, plan

ONE = measure_gpu.dataclasses.replace(
    DRY, first=("linear", "softmax"), others=(), lengths=(), rivals=()
)


def raises(error):
    def behave(length):
        raise error

    return behave


@pytest.fixture
def workers(monkeypatch):
    """Callable from behaviours, as of `FakeWorker`, to `Workers` and a log."""

    def make(seconds=60, device="fake", **behaviour):
        log = []
        fast = dict.fromkeys(["matmul", "linear", "softmax"], lambda length: 0.5)

        def start(backend):
            log.append(backend)
            return FakeWorker(backend, {**fast, **behaviour}, FakeClock(), log)

        monkeypatch.setattr(measure_gpu, "start_worker", start)
        return Workers(time.time() + seconds, device), log

    monkeypatch.setattr(measure_gpu, "BACKENDS", ("torch", "jax"))
    passed = {"passed": 2, "skipped": 0, "failed": [], "exit_status": 0}
    monkeypatch.setattr(measure_gpu, "run_tests", lambda *_: {"torch": passed})
    return make


@pytest.mark.any_backend
def test_the_most_important_comes_first(monkeypatch):
    monkeypatch.setattr(measure_gpu, "BACKENDS", ("torch", "jax"))
    items = list(plan(FULL))
    first = items[: items.index(None)]
    names = ("matmul", "linear", "gated-delta", "softmax", "local", "performer", "vq")
    expected = [(backend, name) for name in names for backend in ("torch", "jax")]
    assert [(backend, task["contestant"]) for backend, task in first] == expected
    for _, task in first:
        shape = task["length"], task["heads"], task["head_dim"], task["mode"]
        assert shape == (16384, 16, 64, "train") and not task["operation"]
    tasks = [item[1] for item in items if item is not None]
    assert {task["length"] for task in tasks} >= {1024, 65536}
    assert {task["head_dim"] for task in tasks} == {64, 128}
    # Each once, and what is compared with the package on PyTorch only.
    assert len({json.dumps(item) for item in items}) == len(items)
    rivals = [i[0] for i in items if i and i[1]["contestant"] in FULL.rivals]
    assert rivals == ["torch", "torch"]


@pytest.mark.any_backend
def test_rows_have_times_memory_and_the_share_of_the_matmul(workers, tmp_path):
    # A fake call has 100 operations a position, in 0.5 or 2 seconds.
    some, log = workers(softmax=lambda length: 2.0)
    results = measure_gpu.run(ONE, some, tmp_path)
    assert results == json.loads((tmp_path / "gpu.json").read_text())
    assert results["not_run"] == [] and set(results["environments"]) == {"torch", "jax"}
    rows = [r for r in results["measurements"] if r["contestant"] == "softmax"]
    assert len(rows) == 8
    for row in rows:
        assert (row["status"], row["seconds"], row["repeats"]) == ("ok", 2.0, 2)
        assert row["memory_bytes"] == 8 * 64 and row["peak_share"] == 0.25
        assert row["compile_seconds"] == STEPS * 2.0 + 3.0 - 2.0
    assert log[:2] == ["torch", "jax"] and log.count("torch") == 1
    table = (tmp_path / "gpu.md").read_text()
    assert "tests with PyTorch: 2 passed, 0 failed, 0 skipped" in table
    assert "Layers, train, 2 heads of 16:" in table
    assert "| `softmax` | 64 | 2000 | 0 | 25% | 2000 | 0 | 25% |" in table


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("behaviour", "status", "started"),
    [
        (lambda length: {"status": "failed", "detail": "no kernel"}, "failed", 1),
        (raises(WorkerDied("exit status -11", False)), "failed", 5),
        (raises(WorkerDied("killed", True)), "out of memory", 5),
        (raises(WorkerTimeout()), "time-out", 5),
    ],
    ids=["reply", "crash", "killed", "time"],
)
def test_a_failure_is_recorded_and_the_next_goes_on(
    workers, tmp_path, behaviour, status, started
):
    some, log = workers(linear=behaviour)
    results = measure_gpu.run(ONE, some, tmp_path)
    by_name = {
        name: {r["status"] for r in results["measurements"] if r["contestant"] == name}
        for name in ("linear", "softmax")
    }
    assert by_name == {"linear": {status}, "softmax": {"ok"}}
    # A process that has ended is started again.
    assert log.count("torch") == started
    table = (tmp_path / "gpu.md").read_text()
    assert f"| `linear` | 64 | {status} | - | - |" in table
    words = "JAX: linear, layer, train, 64 positions, 2 heads of 16"
    assert f"- {words}: {status}: " in table


@pytest.mark.any_backend
def test_a_lack_of_memory_ends_all_processes(workers, tmp_path):
    lack = {"status": "out of memory", "detail": "CUDA out of memory"}
    some, log = workers(linear=lambda length: lack)
    some.measure("torch", next(plan(ONE))[1], 1)
    some.measure("jax", next(plan(ONE))[1], 1)
    row = some.measure("jax", {"contestant": "linear", "length": 64}, 1)
    assert row == lack
    some.measure("torch", next(plan(ONE))[1], 1)
    assert log.count("torch") == 2


@pytest.mark.any_backend
def test_what_the_time_does_not_allow_is_listed(workers, tmp_path):
    some, _ = workers(seconds=measure_gpu.LEAST_SECONDS - 1)
    results = measure_gpu.run(ONE, some, tmp_path)
    assert results["measurements"] == []
    assert results["not_run"][0].startswith("PyTorch: matmul, layer, train")
    assert "tests" in results["not_run"]
    assert "- JAX: softmax, operation, forward" in (tmp_path / "gpu.md").read_text()


@pytest.mark.any_backend
def test_an_interrupt_leaves_what_was_measured(workers, tmp_path):
    some, _ = workers(softmax=raises(KeyboardInterrupt()))
    results = measure_gpu.run(ONE, some, tmp_path)
    names = [row["contestant"] for row in results["measurements"]]
    assert names == ["matmul", "matmul", "linear", "linear"]
    assert results["not_run"][0].startswith("PyTorch: softmax, layer, train")


@pytest.mark.any_backend
def test_a_cpu_in_the_place_of_a_gpu_is_not_measured(workers, tmp_path):
    some, _ = workers(device="gpu")
    results = measure_gpu.run(ONE, some, tmp_path)
    details = {(r["status"], r["detail"]) for r in results["measurements"]}
    assert details == {("skipped", "the device is fake")}


@pytest.mark.any_backend
def test_a_backend_that_does_not_start_is_given_up(workers, tmp_path, monkeypatch):
    some, log = workers()
    monkeypatch.setattr(
        FakeWorker, "wait_for_start", raises_of(WorkerDied("no CUDA", False))
    )
    results = measure_gpu.run(ONE, some, tmp_path)
    assert log.count("torch") == log.count("jax") == measure_gpu.MOST_STARTS
    assert results["measurements"][0]["detail"] == "no CUDA"
    assert results["measurements"][-1]["detail"] == "its process does not start"


def raises_of(error):
    def wait_for_start(self, timeout=None):
        raise error

    return wait_for_start


@pytest.mark.any_backend
def test_outcomes_of_pytest_in_one_process_and_in_several():
    text = """
tests/a.py::test_one[x - y] PASSED                                  [ 25%]
tests/a.py::test_two FAILED                                         [ 50%]
[gw1] [ 75%] PASSED tests/b.py::test_three
tests/b.py::test_four SKIPPED (no GPU)                              [100%]
=========================== short test summary info ===========================
FAILED tests/a.py::test_two
ERROR tests/c.py::test_five
"""
    assert measure_gpu.outcomes(text) == {
        "passed": 2,
        "skipped": 1,
        "failed": ["tests/a.py::test_two", "tests/c.py::test_five"],
    }


@pytest.mark.any_backend
def test_tests_are_stopped_in_time(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_gpu, "BACKENDS", ("torch",))
    file = tmp_path / "test_slow.py"
    file.write_text("import time\ndef test_slow():\n    time.sleep(100)\n")
    start = time.monotonic()
    results = measure_gpu.run_tests((str(file),), 1.0, tmp_path)
    assert time.monotonic() - start < 30
    assert results["torch"]["exit_status"] == -signal.SIGKILL
    content = dict(date="now", environments={}, tests=results)
    words = "tests with PyTorch, until their time was over: 0 passed"
    assert words in measure_gpu.describe(content)


def task(name, mode):
    ours = (item[1] for item in plan(DRY) if item is not None)
    found = next(t for t in ours if t["operation"] and t["mode"] == mode)
    return {**found, "contestant": name, "length": 150}


def dense(name, query, key, value, rate):
    """The operation in float64, of `(batch, length, heads, head_dim)`."""
    steps = np.arange(query.shape[1])
    seen = steps[:, None] >= steps
    if name == "local":
        seen &= steps[:, None] - steps < 128
    if name == "gated-delta":
        query, key = (
            x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)
        )
        decay = -np.log1p(np.exp(-rate))
        return recurrence(query, key, value, decay, np.exp(decay))[0]
    if name == "linear":
        query, key = (np.where(x > 0, x + 1, np.exp(x)) for x in (query, key))
    weights = np.einsum("bthd,bshd->bhts", query, key)
    if name != "linear":
        weights = np.exp(weights / query.shape[-1] ** 0.5)
    weights = weights * seen
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights, value)


@pytest.mark.parametrize("name", measure_gpu.OPERATIONS)
def test_operations_are_their_definitions(name):
    workload = measure_gpu.build(task(name, "forward"))
    inputs = workload.make_inputs(np.random.default_rng(0))
    arrays = [to_numpy(keras.ops.cast(x, "float32")).astype("float64") for x in inputs]
    expected = dense(name, *arrays)
    received = keras.ops.cast(workload.program(*inputs), "float32")
    error = np.linalg.norm(to_numpy(received) - expected) / np.linalg.norm(expected)
    assert error < 0.02


def test_training_gives_a_gradient_for_each_input():
    forward, train = (
        measure_gpu.build(task("gated-delta", mode)) for mode in ("forward", "train")
    )
    assert train.operations == 3 * forward.operations
    cotangent, *inputs = train.make_inputs(np.random.default_rng(0))
    output, *gradients = train.program(cotangent, *inputs)
    assert output.shape == cotangent.shape
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    assert all(float(keras.ops.sum(keras.ops.abs(x))) > 0 for x in gradients)


@pytest.mark.any_backend
def test_tables_of_a_file(tmp_path, workers, capsys):
    some, _ = workers()
    measure_gpu.run(ONE, some, tmp_path)
    capsys.readouterr()
    assert measure_gpu.main(["--table", str(tmp_path / "gpu.json")]) == 0
    assert capsys.readouterr().out == (tmp_path / "gpu.md").read_text()


@pytest.mark.any_backend
def test_a_folder_that_cannot_be_made_gets_one_line(capsys):
    assert measure_gpu.main(["--out", f"{__file__}/gpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"measure_gpu: error: --out: folder {__file__}/gpu: ")
    assert error.count("\n") == 1


def test_the_command_runs_to_the_end_on_a_cpu(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs a backend that it measures")
    command = [sys.executable, "-m", "tools.measure_gpu", "--dry-run"]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=560)
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["not_run"] == [] and set(results["tests"]) == set(BACKENDS)
    for tests in results["tests"].values():
        assert tests["passed"] > 0 and not tests["failed"]
    for row in results["measurements"]:
        if row["contestant"] == measure_gpu.FLA:
            assert row["status"] == "unsupported" and "pip install" in row["detail"]
        else:
            assert row["status"] == "ok" and row["finite"] and row["seconds"] > 0
