import pytest

from keras_efficient_attn.benchmark import Timing, time_functions
from keras_efficient_attn.benchmark.timing import take_turns
from tests.benchmark.fakes import FakeClock


def test_functions_take_turns_and_only_their_calls_are_timed():
    clock, calls = FakeClock(), []
    durations = {"a": iter([50.0, 1.0, 2.0, 9.0]), "b": iter([7.0, 4.0, 4.0, 4.0])}

    def make_inputs(name, turn):
        clock.sleep(1000.0)  # Must not be counted.
        return name, turn

    def function(name, turn):
        calls.append((name, turn))
        clock.sleep(next(durations[name]))
        return name

    def finish(outputs):
        # Waiting for inputs is not counted; waiting for outputs is.
        clock.sleep(0.5 if isinstance(outputs, str) else 100.0)

    timings = time_functions(
        {"a": function, "b": function},
        make_inputs=make_inputs,
        repeats=3,
        clock=clock,
        finish=finish,
    )
    assert calls == [(n, t) for t in range(4) for n in "ab"]
    assert timings["a"] == Timing(50.5, (1.5, 2.5, 9.5))
    assert timings["b"].seconds == (4.5, 4.5, 4.5)
    assert timings["a"].median == 2.5
    assert timings["a"].spread == (2.0, 6.0)
    assert timings["a"].compilation == 48.0


def test_the_default_waits_for_tensors_of_the_backend(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(
        "keras_efficient_attn.benchmark.execution.wait",
        lambda outputs: clock.sleep(len(outputs)),
    )
    functions = {"three": lambda: "abc"}
    timings = time_functions(functions, repeats=2, clock=clock)
    assert timings["three"].seconds == (3.0, 3.0)


def test_a_contestant_that_gives_up_is_not_asked_again():
    asked = []

    def sample(name, turn):
        asked.append((name, turn))
        return None if (name, turn) == ("b", 1) else turn

    assert take_turns("abc", 3, sample) == {"a": [0, 1, 2], "b": [0], "c": [0, 1, 2]}
    assert asked == [(n, t) for t in range(3) for n in "abc" if (n, t) != ("b", 2)]


def test_repeats_must_be_positive():
    with pytest.raises(ValueError, match="repeats=0"):
        time_functions({}, repeats=0)
