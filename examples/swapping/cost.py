"""Time and memory of a whole model, before and after its attention is swapped."""

import math
import os
from pathlib import Path

import numpy as np
from keras import ops

from keras_efficient_attn import benchmark
from keras_efficient_attn.benchmark.execution import backend_module, make_program, wait
from keras_efficient_attn.benchmark.records import OUT_OF_MEMORY, describe_failure
from keras_efficient_attn.benchmark.report import align

SOFTMAX, SWAPPED = "softmax", "swapped"
# Additional lengths, measured to predict longer ones.
PROBES = (256, 1024)
REPEATS = 3
# Seconds of a run that is timed only once.
LONG = 2.0
MEMORY_SHARE = 1 / 2
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MIB = 2**20


def measure(original, converted, lengths, time_limit):
    """Prints a table of both models' forward time and memory at several lengths.

    For each model it builds one of the same configuration with positions for the
    longest length, and runs it on one text of random tokens. Runs that would probably
    exceed the time limit, or half of the free memory, are skipped.

    Args:
        original, converted: Backbones.
        lengths: Lengths in tokens.
        time_limit: Maximum seconds per run of a model.
    """
    models = {
        name: lengthen(backbone, max(lengths))
        for name, backbone in ((SOFTMAX, original), (SWAPPED, converted))
    }
    # Memory and time grow with the square of the length, or slower.
    history = {
        SOFTMAX: History(quadratic=True),
        SWAPPED: History(quadratic=False),
    }
    print(
        "\nthe whole model, forward, one text of random tokens; its weights are random "
        "too, and no time depends on them",
        flush=True,
    )
    rows = [("length", f"{SOFTMAX} ms", "MiB", f"{SWAPPED} ms", "MiB", "times faster")]
    probes = [length for length in PROBES if length < max(lengths)]
    for length in sorted({*probes, *lengths}):
        points = _measure(models, history, length, time_limit)
        if length in lengths:
            rows.append(_row(length, points))
    print("", *align(rows), "", f"MiB: {_memory_kind(history)}", sep="\n")
    for name, found in history.items():
        if found.reason:
            print(f"- for {name}: {found.reason}")
    print(end="", flush=True)


def predict(points, length, quadratic):
    """Predicts a quantity at a length, or an upper bound.

    Args:
        points: List of `(length, value)`, by length.
        length: A length beyond those of `points`.
        quadratic: Whether to assume quadratic growth, which is a bound. Otherwise
            `a·length + b·length²` through the last two points, with non-negative `a`
            and `b`; for one point, `a·length`.
    """
    last, value = points[-1]
    if quadratic:
        return value * (length / last) ** 2
    rate = value / last
    if len(points) == 1:
        return rate * length
    before, earlier = points[-2]
    growth = (rate - earlier / before) / (last - before)
    growth = min(max(growth, 0.0), rate / last)
    return (rate - growth * last) * length + growth * length**2


class History:
    """The measurements of a model.

    Attributes:
        seconds, memory: Lists of `(length, value)`.
        kind: Kind of memory that is counted.
        reason: Why measurements stop at some length, or `None`.
    """

    def __init__(self, quadratic):
        self._quadratic = quadratic
        self.seconds, self.memory = [], []
        self.kind = self.reason = None

    def add(self, length, seconds, memory):
        self.seconds.append((length, seconds))
        self.memory.append((length, memory))

    def estimate(self, length):
        """Expected seconds and bytes at a length, from shorter ones."""
        if not self.seconds:
            return 0.0, 0.0
        return (
            predict(self.seconds, length, self._quadratic),
            predict(self.memory, length, self._quadratic),
        )

    def leave_out(self, length, time_limit):
        """Whether to skip a length, or a shorter one was skipped."""
        if self.reason is None:
            seconds, memory = self.estimate(length)
            free = free_memory()
            if seconds > time_limit:
                self.reason = (
                    f"would run for about {seconds:.0f} s at length {length}, longer "
                    f"than --time-limit {time_limit:g}"
                )
            elif memory > MEMORY_SHARE * free:
                self.reason = (
                    f"would need about {memory / MIB:.0f} MiB at length {length}, more "
                    f"than half of the {free / MIB:.0f} MiB that are free"
                )
        return self.reason is not None


def free_memory():
    """Bytes that this process may still use of the machine's memory."""
    free = [math.inf]
    if MEMINFO.exists():
        lines = MEMINFO.read_text().splitlines()
        free += [
            int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line
        ]
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # The limit of a container.
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free.append(int(limit.read_text()) - int(used.read_text()))
    return min(free)


def seconds_in_turns(models, length):
    """The median seconds of a forward pass of one text of each model, a dict.

    Args:
        models: Dict by name of backbones, with positions for the length.
        length: Tokens.
    """
    programs = {
        name: make_program(lambda data, model=model: model(data, training=False), model)
        for name, model in models.items()
    }
    timings = benchmark.time_functions(
        programs,
        make_inputs=lambda name, turn: (_random_inputs(models[name], length, turn),),
    )
    return {name: timing.median for name, timing in timings.items()}


def lengthen(backbone, length):
    """An untrained backbone of the same configuration, for texts of a length."""
    config = backbone.get_config()
    if config.get("max_sequence_length") is not None:
        config["max_sequence_length"] = max(length, config["max_sequence_length"])
    return type(backbone).from_config(config)


def _measure(models, history, length, time_limit):
    """`(seconds, bytes)` of each model that is not skipped, a dict."""
    programs, memory = {}, {}
    for name, model in models.items():
        found = history[name]
        if found.leave_out(length, time_limit):
            continue
        program = make_program(
            lambda data, model=model: model(data, training=False), model
        )
        inputs = (_random_inputs(model, length, 0),)
        try:
            wait(program(*inputs))
            memory[name], found.kind = backend_module().peak_memory(program, inputs)
        except Exception as error:
            failure = describe_failure(error, building=False)
            if failure["status"] != OUT_OF_MEMORY:
                raise
            found.reason = f"{failure['status']} at length {length}"
            continue
        programs[name] = program
    if not programs:
        return {}
    long = any(history[name].estimate(length)[0] > LONG for name in programs)
    timings = benchmark.time_functions(
        programs,
        make_inputs=lambda name, turn: (_random_inputs(models[name], length, turn),),
        repeats=1 if long else REPEATS,
    )
    points = {}
    for name, timing in timings.items():
        points[name] = timing.median, memory[name]
        history[name].add(length, *points[name])
    return points


def _random_inputs(backbone, length, seed):
    """A text of random tokens, none of them padding."""
    random = np.random.default_rng((length, seed))
    inputs = {}
    for name in backbone.input:
        if "token_ids" in name:
            most = backbone.token_embedding.input_dim
            values = random.integers(0, most, (1, length))
        else:
            values = np.full((1, length), "padding_mask" in name)
        inputs[name] = ops.convert_to_tensor(values, "int32")
    return inputs


def _row(length, points):
    cells = [f"{length}"]
    for name in (SOFTMAX, SWAPPED):
        seconds, memory = points.get(name, (None, None))
        cells.append("-" if seconds is None else f"{1e3 * seconds:.1f}")
        cells.append("-" if memory is None else f"{memory / MIB:.1f}")
    both = len(points) == 2
    cells.append(f"{points[SOFTMAX][0] / points[SWAPPED][0]:.2f}" if both else "-")
    return cells


def _memory_kind(history):
    return next((found.kind for found in history.values() if found.kind), "-")
