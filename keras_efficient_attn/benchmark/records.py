"""What `compare` returns: records with their statuses, slopes and crossovers."""

import dataclasses
import math
import re

import numpy as np

from keras_efficient_attn.benchmark.settings import MATMUL, SOFTMAX, Settings

# Statuses of a record.
OUT_OF_MEMORY = "out of memory"
TIME_OUT = "time-out"
UNSUPPORTED = "unsupported"
FAILED = "failed"
SKIPPED = "skipped"
OK = "ok"
# Of a failure's message; errors of contestants that refuse; what allocators say.
DETAIL_LENGTH = 300
REFUSALS = (ValueError, NotImplementedError, AssertionError, ImportError, TypeError)
MEMORY_SIGNS = (
    "out of memory",
    "resource_exhausted",
    "resource exhausted",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
    "bad_alloc",
    "oom when allocating",
)


@dataclasses.dataclass(frozen=True)
class Record:
    """One contestant at one length. Fields that were not measured are `None`.

    Attributes:
        contestant: Name.
        backend: Backend that the contestant ran on.
        mode: `"forward"`, `"train"` or `"decode"`.
        length: Positions.
        status: `"ok"`, or the reason for a missing time: `"out of memory"`,
            `"time-out"`, `"unsupported"`, `"failed"` or `"skipped"`.
        detail: A line about the status, or empty.
        seconds: Median seconds per call; for decoding, per generated position.
        seconds_low, seconds_high: Quartiles.
        repeats: Timed calls.
        compile_seconds: Seconds by which the first call exceeded the median.
        tokens_per_second: Throughput, summed over the batch.
        memory_bytes: Peak memory of a call; `memory_kind` is its kind.
        memory_kind: `"XLA temporaries"` (beside inputs, outputs and weights),
            `"resident increase"` (of the process, in a call after the first), or
            `"device"` (all memory of the process on the accelerator).
        execution: `"XLA"`, `"graph"` or `"eager"`.
        error: Relative error against softmax attention with the same weights.
        peak_share: Useful operations per second, as a share of the matmul's.
    """

    contestant: str
    backend: str
    mode: str
    length: int
    status: str
    detail: str = ""
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    repeats: int = 0
    compile_seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    memory_kind: str | None = None
    execution: str | None = None
    error: float | None = None
    peak_share: float | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """One contestant over all lengths.

    Attributes:
        contestant: Name.
        crossover: Length from which it is faster than softmax, as text: a bound, or an
            interpolated number; `None` without softmax.
        time_slope: Slope of log seconds over log length; `None` for a single length.
        memory_slope: Slope of log peak memory over log length.
    """

    contestant: str
    crossover: str | None
    time_slope: float | None
    memory_slope: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A finished run.

    Attributes:
        settings: The `Settings`.
        records: List of `Record`, by length and contestant, the matmul's included.
        environment: Dict of versions and the device; empty if no process has started.
        complete: `False` if the run was interrupted.
    """

    settings: Settings
    records: list
    environment: dict
    complete: bool = True

    def contestants(self):
        """Names in the order of the run, without the matmul."""
        names = dict.fromkeys(record.contestant for record in self.records)
        return [name for name in names if name != MATMUL]

    def of(self, contestant):
        """The records of a contestant, by length."""
        return [r for r in self.records if r.contestant == contestant]

    def series(self, contestant, field):
        """Dict of lengths to a field, where it was measured."""
        return {
            record.length: getattr(record, field)
            for record in self.of(contestant)
            if record.status == OK and getattr(record, field) is not None
        }

    def summaries(self):
        """List of `Summary`, one per contestant."""
        softmax = self.series(SOFTMAX, "seconds")
        return [
            Summary(
                name,
                crossover(softmax, self.series(name, "seconds"))
                if softmax and name != SOFTMAX
                else None,
                log_log_slope(self.series(name, "seconds")),
                log_log_slope(self.series(name, "memory_bytes")),
            )
            for name in self.contestants()
        ]


# Ratios of times above it count as slower.
SLOWER = 1.1
# Settings that two runs must share to be compared.
SHAPE = ("heads", "head_dim", "batch", "dtype", "mode", "causal", "backend", "model")


def time_ratios(comparison, before):
    """How many times as long contestants take as in an earlier run.

    Seconds count in those of an operation of the run's matmul at the same length, if
    both runs have it, so that a slower machine makes no contestant slower.

    Args:
        comparison: `Comparison`.
        before: Another, of the same shape.

    Returns:
        Dict of `(contestant, length)` to the ratio, for what both measured.

    Raises:
        ValueError: If the settings of the shape differ.
    """
    for name in SHAPE:
        new, old = (getattr(run.settings, name) for run in (comparison, before))
        if new != old:
            raise ValueError(
                f"The runs to compare must have the same {name}. Received: {new!r} "
                f"in this run, {old!r} in the earlier one"
            )
    units = [_matmul_seconds(run) for run in (comparison, before)]
    ratios = {}
    for contestant in comparison.contestants():
        old = before.series(contestant, "seconds")
        for length, seconds in comparison.series(contestant, "seconds").items():
            if length in old:
                new_unit, old_unit = (unit.get(length) for unit in units)
                both = new_unit and old_unit
                unit = new_unit / old_unit if both else 1.0
                ratios[contestant, length] = seconds / old[length] / unit
    return ratios


def _matmul_seconds(comparison):
    """Seconds of a multiplication and addition of the matmul, by length."""
    # The tokens of a square matmul are its rows.
    speeds = comparison.series(MATMUL, "tokens_per_second")
    return {
        length: seconds / (seconds * speeds[length]) ** 3
        for length, seconds in comparison.series(MATMUL, "seconds").items()
    }


def log_log_slope(series):
    """Least-squares slope of log value over log length.

    Args:
        series: Dict of lengths to values; values of 0 are left out.

    Returns:
        A float, or `None` for fewer than two points.

    Example:

    >>> from keras_efficient_attn.benchmark import log_log_slope
    >>> round(log_log_slope({512: 1.0, 1024: 4.0, 2048: 16.0}), 6)
    2.0
    """
    points = [(math.log(n), math.log(y)) for n, y in series.items() if y > 0]
    if len(points) < 2:
        return None
    return float(np.polyfit(*np.transpose(points), 1)[0])


def crossover(baseline, series):
    """The length from which `series` stays below `baseline`.

    Args:
        baseline: Dict of lengths to values.
        series: Dict of lengths to values. Lengths missing from either dict are ignored.

    Returns:
        `"≤ 512"` if `series` is below from the first common length on; `"> 4096"` if it
        is not below at the last; otherwise, as `"1234"`, the length where straight
        lines between the logarithms cross. `None` without a common length.
    """
    lengths = sorted(set(baseline) & set(series))
    if not lengths:
        return None
    ratios = [math.log(series[n] / baseline[n]) for n in lengths]
    if ratios[-1] >= 0:
        return f"> {lengths[-1]}"
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 0), default=None)
    if last is None:
        return f"≤ {lengths[0]}"
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    before, after = math.log(lengths[last]), math.log(lengths[last + 1])
    return f"{math.exp(before + share * (after - before)):.0f}"


def describe_failure(error, building):
    """The failure as a dict with `status` and `detail`.

    Args:
        error: The exception.
        building: Whether nothing has been measured yet. A `ValueError` or similar then
            means that the contestant does not support the combination.
    """
    text = _plain(str(error)) or type(error).__name__
    status = FAILED
    if isinstance(error, MemoryError) or any(
        sign in f"{type(error).__name__} {text}".lower() for sign in MEMORY_SIGNS
    ):
        status = OUT_OF_MEMORY
    elif building and isinstance(error, REFUSALS):
        status = UNSUPPORTED
    return {"status": status, "detail": text[:DETAIL_LENGTH]}


def _plain(text):
    """One line, without the colours and frame that Keras adds to errors."""
    text = re.sub(r"\x1b\[\d+m", "", text)
    text = re.sub(r"^Exception encountered when calling [^\n]*\n", "", text)
    return " ".join(text.partition("Arguments received by")[0].split())
