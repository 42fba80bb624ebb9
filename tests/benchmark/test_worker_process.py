import os
import signal
import sys
import time

import keras
import pytest

from keras_efficient_attn.benchmark import Record, worker_process
from keras_efficient_attn.benchmark.memory import (
    peak_increase,
    temporary_bytes,
    xla_dump_flags,
)
from keras_efficient_attn.benchmark.records import describe_failure
from keras_efficient_attn.benchmark.settings import MATMUL, Settings
from keras_efficient_attn.benchmark.worker_process import (
    WorkerDied,
    WorkerProcess,
    WorkerTimeout,
)


@pytest.fixture
def start():
    workers = []

    def run(code):
        words = [sys.executable, "-c", f"print('{{}}', flush=True)\ninput()\n{code}"]
        workers.append(WorkerProcess("jax", words))
        assert workers[-1].wait_for_start() == {}
        return workers[-1]

    yield run
    for worker in workers:
        worker.close()


def test_a_worker_finds_the_modules_beside_a_script(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/folder/of/script", *sys.path])
    paths = worker_process._environment("jax", "dump")["PYTHONPATH"]
    assert paths.split(os.pathsep)[-1] == "/folder/of/script"


def test_a_worker_measures_in_a_process_of_its_own():
    backend = keras.backend.backend()
    worker = WorkerProcess(backend)
    try:
        environment = worker.wait_for_start()
        assert environment["backend"] == backend
        assert environment["keras"] == keras.__version__
        task = Settings(matmul_size=16).task(MATMUL, 100)
        prepared = worker.request({"do": "prepare", "task": task}, 60)
        assert prepared["operations"] == 2 * 16**3
        assert prepared["finite"] and prepared["first"] > 0
        assert worker.request({"do": "repeat", "turn": 0}, 60)["seconds"] > 0
        # XLA holds the score matrix, and only a few of its size.
        options = dict(heads=2, head_dim=4)
        task = Settings(layers=["softmax"], **options).task("softmax", 256)
        prepared = worker.request({"do": "prepare", "task": task}, 60)
        if prepared["execution"] == "XLA":
            assert prepared["memory_kind"] == "XLA temporaries"
            assert 1 <= prepared["memory_bytes"] / (2 * 256**2 * 4) < 5
        # Reading the prompt needs its projections; a step afterwards does not.
        options |= dict(layers=["performer:feature_map=elu"], mode="decode")
        task = Settings(**options).task("performer:feature_map=elu", 256)
        prepared = worker.request({"do": "prepare", "task": task}, 60)
        if prepared["execution"] == "XLA":
            assert 0 < prepared["memory_bytes"] < 256 * 8 * 4
        # A failure is a reply; the worker stays alive, with nothing to repeat.
        bad = {**task, "contestant": "no such layer"}
        reply = worker.request({"do": "prepare", "task": bad}, 60)
        assert "no such layer" in reply["detail"]
        assert "status" in worker.request({"do": "repeat", "turn": 1}, 60)
        assert "first" in worker.request({"do": "prepare", "task": task}, 60)
    finally:
        worker.close()


def test_a_call_that_hangs_is_given_up(start):
    worker = start("import time\ntime.sleep(1000)")
    begin = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"no reply within 0\.2 s"):
        worker.request({}, 0.2)
    worker.close()
    assert time.monotonic() - begin < 100
    with pytest.raises(ProcessLookupError):
        os.kill(worker._process.pid, 0)


def test_a_killed_worker_is_told_from_one_that_failed(start):
    killed = start("import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(WorkerDied) as death:
        killed.request({}, 60)
    assert death.value.killed and f"{-signal.SIGKILL}" in str(death.value)
    failed = start("raise SystemExit('no such device')")
    with pytest.raises(WorkerDied, match="no such device") as death:
        failed.request({}, 60)
    assert not death.value.killed


@pytest.mark.parametrize(
    "error, building, status",
    [
        (MemoryError(), False, "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: 40 GB"), False, "out of memory"),
        (RuntimeError("can't allocate memory"), True, "out of memory"),
        (ValueError("`window` needs ..."), True, "unsupported"),
        (ImportError("fla"), True, "unsupported"),
        (ValueError("shapes"), False, "failed"),
        (TypeError("a bug"), False, "failed"),
        (RuntimeError("a bug"), True, "failed"),
    ],
)
def test_failures_have_a_word(error, building, status):
    assert describe_failure(error, building)["status"] == status


def test_failures_have_a_line():
    framed = ValueError(
        "Exception encountered when calling Layer.call().\n\n\x1b[1mno causal\nform"
        "\x1b[0m\n\nArguments received by Layer.call():\n  • x=1"
    )
    assert describe_failure(framed, False)["detail"] == "no causal form"


def test_resident_increase_is_that_of_the_call():
    size = 64 * 2**20
    assert 0.95 * size < peak_increase(lambda: b"x" * size) < 2 * size
    # Again, although the process already reached this peak.
    assert 0.95 * size < peak_increase(lambda: b"x" * size) < 2 * size
    assert peak_increase(lambda: None) < size / 8


def test_temporaries_are_those_of_the_program_compiled_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert temporary_bytes() is None
    monkeypatch.setenv("XLA_FLAGS", xla_dump_flags(tmp_path))
    assert temporary_bytes() is None
    line = "allocation {}: size {}, {}:\n"
    for age, name, sizes in ((2, "a", (4000, 96)), (1, "b", (500, 12))):
        file = tmp_path / f"module_{name}.cpu-buffer-assignment.txt"
        file.write_text(
            line.format(0, 70_000, "parameter 0, shape |f32[8]|")
            + line.format(1, sizes[0], "preallocated-temp")
            + line.format(2, sizes[1], "preallocated-temp")
        )
        os.utime(file, (1e9 - age, 1e9 - age))
        assert temporary_bytes() == sum(sizes)


def test_records_are_plain():
    record = Record("softmax", "jax", "forward", 512, "ok", seconds=1.0)
    assert record.length == 512 and record.memory_bytes is None
