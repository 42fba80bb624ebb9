import dataclasses
import math

import pytest

from keras_efficient_attn import LinearAttention, benchmark
from keras_efficient_attn.benchmark.report import table, write_json, write_plots
from keras_efficient_attn.benchmark.worker_process import WorkerDied, WorkerTimeout
from keras_efficient_attn.layers.attention import registry
from tests.benchmark.fakes import FakeClock, FakeWorker

pytestmark = pytest.mark.any_backend

SOFTMAX, ELU, FAVOR = "softmax", "performer:feature_map=elu", "performer"
LENGTHS = (100, 200, 400)


class Counter:
    """Counts the steps of the progress bar."""

    def __init__(self, steps):
        self.expected, self.done = steps, 0
        Counter.last = self

    def add(self, count):
        assert count >= 0
        self.done += count


def race(behaviour, layers=(SOFTMAX, ELU), **options):
    clock, log = FakeClock(), []
    behaviour = {"matmul": lambda n: 0.5, **behaviour}
    comparison = benchmark.compare(
        layers,
        options.pop("lengths", LENGTHS),
        start_worker=lambda backend: FakeWorker(backend, behaviour, clock, log),
        clock=clock,
        progress=Counter,
        **options,
    )
    assert not comparison.complete or Counter.last.done == Counter.last.expected
    return comparison, log


def fail(error, beyond):
    def seconds(length):
        if length > beyond:
            raise error
        return 1.0

    return seconds


def statuses(comparison, contestant):
    return [record.status for record in comparison.of(contestant)]


def test_contestants_take_turns_at_each_length():
    _, log = race({SOFTMAX: lambda n: 1.0, ELU: lambda n: 1.0}, repeats=2)
    names = ["matmul", SOFTMAX, ELU]
    expected = []
    for length in LENGTHS:
        expected += [("prepare", name, length) for name in names]
        expected += [("repeat", name, length) for name in names] * 2
        expected += [("check", name, length) for name in names[1:]]
    assert log == expected


def test_pictures_are_drawn_of_what_was_measured(tmp_path):
    comparison, _ = race({SOFTMAX: lambda n: 1.0, ELU: lambda n: 2.0})
    written = write_plots(comparison, tmp_path)
    assert [path.name for path in written] == ["time.png", "memory.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
    without = [dataclasses.replace(r, memory_bytes=0) for r in comparison.records]
    comparison = dataclasses.replace(comparison, records=without)
    assert [path.name for path in write_plots(comparison, tmp_path)] == ["time.png"]


def test_figures_of_known_workloads():
    comparison, _ = race(
        {SOFTMAX: lambda n: 1e-5 * n**2, ELU: lambda n: 2e-3 * n}, repeats=3
    )
    record = comparison.of(ELU)[1]
    assert (record.length, record.status, record.repeats) == (200, "ok", 3)
    assert record.seconds == pytest.approx(0.4)
    assert (record.seconds_low, record.seconds_high) == pytest.approx((0.4, 0.4))
    assert record.compile_seconds == pytest.approx(3.0)
    assert record.tokens_per_second == pytest.approx(500)
    assert record.memory_bytes == 1600
    assert record.error == 0.25
    # 20,000 operations in 0.4 s, of a matmul with as many in 0.5 s.
    assert record.peak_share == pytest.approx(1.25)
    softmax, linear = comparison.summaries()
    assert linear.time_slope == pytest.approx(1.0)
    assert linear.memory_slope == pytest.approx(1.0)
    assert softmax.time_slope == pytest.approx(2.0)
    assert softmax.crossover is None
    assert linear.crossover == "200"


def test_an_error_that_is_no_number_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(FakeWorker, "error", math.nan)
    comparison, _ = race({SOFTMAX: lambda n: 1.0, ELU: lambda n: 1.0})
    assert comparison.of(ELU)[0].error is None
    write_json(comparison, tmp_path / "benchmark.json")
    assert "NaN" not in (tmp_path / "benchmark.json").read_text()


def test_a_time_out_ends_the_contestant_and_nothing_else():
    comparison, log = race(
        {SOFTMAX: fail(WorkerTimeout(), beyond=100), ELU: lambda n: 1.0}
    )
    assert statuses(comparison, SOFTMAX) == ["ok", "time-out", "skipped"]
    assert statuses(comparison, ELU) == ["ok", "ok", "ok"]
    assert comparison.of(SOFTMAX)[2].detail == "time-out at length 200"
    assert ("prepare", SOFTMAX, 400) not in log
    cells = [line.split()[2] for line in table_rows(comparison, SOFTMAX)]
    assert cells[1:] == ["time-out", "skipped"]


def test_over_the_limit_in_its_turns_it_keeps_what_it_has():
    # The first call and three turns take 16 s.
    comparison, log = race(
        {SOFTMAX: lambda n: 4.0 * n / 100, ELU: lambda n: 1.0},
        repeats=5,
        time_limit=14.0,
    )
    first, second, third = comparison.of(SOFTMAX)
    assert (first.status, first.repeats) == ("ok", 3)
    assert first.detail == "3 repeats within 14 s"
    assert second.status == third.status == "skipped"
    assert log.count(("repeat", SOFTMAX, 100)) == 3
    assert log.count(("repeat", ELU, 100)) == 5


def test_a_first_call_over_the_limit_is_a_time_out():
    comparison, _ = race({SOFTMAX: lambda n: 20.0, ELU: lambda n: 1.0}, time_limit=14.0)
    assert statuses(comparison, SOFTMAX) == ["time-out", "skipped", "skipped"]


def test_a_worker_that_does_not_start_says_how_long_it_was_awaited(monkeypatch):
    def wait_for_start(worker, timeout=None):
        raise WorkerTimeout("no reply within 600 s")

    monkeypatch.setattr(FakeWorker, "wait_for_start", wait_for_start)
    comparison, _ = race({SOFTMAX: lambda n: 1.0, ELU: lambda n: 1.0}, time_limit=14.0)
    first, second, _ = comparison.of(SOFTMAX)
    assert (first.status, first.detail) == ("time-out", "no reply within 600 s")
    assert (second.status, second.detail) == ("skipped", "time-out at length 100")


@pytest.mark.parametrize("killed, status", [(True, "out of memory"), (False, "failed")])
def test_a_dead_worker_is_a_cell(killed, status):
    died = WorkerDied("exit status 9", killed)
    comparison, _ = race({SOFTMAX: fail(died, beyond=200), ELU: lambda n: 1.0})
    assert statuses(comparison, SOFTMAX) == ["ok", "ok", status]
    assert statuses(comparison, ELU) == ["ok", "ok", "ok"]


def test_out_of_memory_beside_others_it_is_measured_alone():
    calls = []

    def softmax(n):
        calls.append(n)
        if calls.count(200) == 1:
            raise WorkerDied("exit status -9", True)
        return 2.0

    comparison, log = race({SOFTMAX: softmax, ELU: lambda n: 1.0})
    assert statuses(comparison, SOFTMAX) == ["ok", "ok", "ok"]
    second = comparison.of(SOFTMAX)[1]
    assert (second.seconds, second.repeats, second.error) == (2.0, 5, 0.25)
    assert second.detail == "measured alone: no memory beside the others"
    at_200 = [(done, name) for done, name, n in log if n == 200]
    others = max(i for i, (_, name) in enumerate(at_200) if name == ELU)
    assert at_200[others + 1 :] == [
        ("prepare", SOFTMAX),
        *[("repeat", SOFTMAX)] * 5,
        ("check", SOFTMAX),
    ]


@pytest.mark.parametrize(("scarce", "status"), [(True, "ok"), (False, "time-out")])
def test_where_memory_ran_out_a_time_out_is_measured_alone(scarce, status):
    failures = {
        SOFTMAX: iter([WorkerDied("exit status -9", True)] if scarce else []),
        ELU: iter([WorkerTimeout("no reply within 60 s")]),
    }

    def behaviour(name):
        def seconds(n):
            for failure in failures[name]:
                raise failure
            return 1.0

        return seconds

    comparison, _ = race({n: behaviour(n) for n in (SOFTMAX, ELU)}, lengths=[100])
    assert statuses(comparison, SOFTMAX) == ["ok"]
    assert statuses(comparison, ELU) == [status]


def test_an_interrupt_alone_keeps_the_others():
    died = WorkerDied("exit status -9", True)
    failures = iter([died, KeyboardInterrupt()])

    def softmax(n):
        raise next(failures)

    comparison, _ = race({SOFTMAX: softmax, ELU: lambda n: 1.0})
    assert not comparison.complete
    (record,) = comparison.of(SOFTMAX)
    assert (record.status, record.detail) == ("skipped", "interrupted")
    (record,) = comparison.of(ELU)
    assert (record.status, record.repeats, record.detail) == ("ok", 5, "")


def test_unsupported_at_one_length_is_tried_at_the_next():
    reply = {"status": "unsupported", "detail": "not divisible by 200"}
    comparison, _ = race(
        {SOFTMAX: lambda n: 1.0, ELU: lambda n: 1.0 if n % 200 == 0 else reply}
    )
    assert statuses(comparison, ELU) == ["unsupported", "ok", "ok"]
    assert "not divisible by 200" in table_rows(comparison, ELU)[0]


def test_without_the_matmul_there_is_no_share():
    reply = {"status": "failed", "detail": "no such type"}
    comparison, _ = race(
        {SOFTMAX: lambda n: 1.0, ELU: lambda n: 1.0, "matmul": lambda n: reply}
    )
    assert {record.peak_share for record in comparison.records} == {None}


def test_an_interrupt_keeps_the_lengths_that_are_done():
    comparison, _ = race(
        {SOFTMAX: fail(KeyboardInterrupt(), beyond=100), ELU: lambda n: 1.0}
    )
    assert not comparison.complete
    for name in ("matmul", SOFTMAX, ELU):
        assert statuses(comparison, name) == ["ok", "skipped"]
        assert comparison.of(name)[1].detail == "interrupted"


@pytest.mark.parametrize(("length", "missing"), [(200, True), (400, False)])
def test_an_interrupt_keeps_what_its_length_has_measured(length, missing):
    calls = []

    def softmax(n):
        calls.append(n)
        # The first call, two turns, and a third in which the user stops.
        if calls.count(length) == 4:
            raise KeyboardInterrupt
        return 3.0 * n / 100

    reply = {"status": "unsupported", "detail": "no such form"}
    behaviour = {SOFTMAX: softmax, ELU: lambda n: 1.0, FAVOR: lambda n: reply}
    comparison, _ = race(behaviour, layers=(ELU, SOFTMAX, FAVOR))
    assert not comparison.complete
    elu, last = comparison.of(ELU)[-1], comparison.of(SOFTMAX)[-1]
    assert (last.length, last.status, last.repeats) == (length, "ok", 2)
    assert last.seconds == pytest.approx(3.0 * length / 100)
    assert last.detail == "interrupted after 2 repeats"
    assert (elu.repeats, elu.error) == (3, None)
    # The matmul has 100 operations a token in 0.5 s, the layers have as many.
    assert last.peak_share == pytest.approx(0.5 / last.seconds)
    assert statuses(comparison, FAVOR)[-1] == "unsupported"
    comparison.environment.clear()
    assert ("longer lengths are missing" in table(comparison)) is missing
    assert "Interrupted" in table(comparison)


def test_an_interrupt_keeps_a_contestant_over_its_limit():
    def elu(n):
        # Softmax is over its limit after its first call and a turn.
        if log.count(("repeat", ELU, 100)) == 3:
            raise KeyboardInterrupt
        return 1.0

    clock, log = FakeClock(), []
    behaviour = {"matmul": lambda n: 0.5, SOFTMAX: lambda n: 4.0, ELU: elu}
    comparison = benchmark.compare(
        [SOFTMAX, ELU],
        [100],
        time_limit=7.0,
        start_worker=lambda backend: FakeWorker(backend, behaviour, clock, log),
        clock=clock,
    )
    (record,) = comparison.of(SOFTMAX)
    assert (record.status, record.repeats) == ("ok", 1)
    assert record.detail == "1 repeats within 7 s; interrupted after 1 repeats"


def test_lengths_are_sorted_and_causality_follows_the_mode():
    comparison, _ = race(
        {SOFTMAX: lambda n: 1.0, ELU: lambda n: 1.0},
        lengths=[300, 100, 300],
        mode="decode",
    )
    assert comparison.settings.lengths == (100, 300)
    assert comparison.settings.causal


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layers": []}, "`layers`"),
        ({"layers": "softmax"}, "`layers`.*'softmax'"),
        ({"layers": ["softmax", "softmax"]}, "`layers`"),
        ({"layers": ["sofmax"]}, "sofmax"),
        ({"layers": ["performer:feature_map=el"]}, "feature_map='el'"),
        ({"lengths": [0]}, "lengths=0"),
        ({"heads": 1.5}, "heads=1.5"),
        ({"repeats": 0}, "repeats=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"mode": "backward"}, "mode='backward'"),
        ({"backend": "numpy"}, "backend='numpy'"),
        ({"time_limit": -1}, "time_limit=-1"),
        ({"matmul_size": 0}, "matmul_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"lengths": None}, "lengths=None"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmark.compare(**arguments)


def test_a_layer_of_a_script_cannot_be_measured(monkeypatch):
    layer_class = type("Mine", (LinearAttention,), {"__module__": "__main__"})
    monkeypatch.setitem(registry._LAYERS, "mine", layer_class)
    with pytest.raises(ValueError, match="`layers`.*module.*'mine'"):
        benchmark.compare(["mine"])


def table_rows(comparison, contestant):
    # The table has the measurements first, then a line about the contestant's curve.
    comparison.environment.clear()
    lines = table(comparison).splitlines()
    return [line for line in lines if line.startswith(f"{contestant} ")][:-1]
