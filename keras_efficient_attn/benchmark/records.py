"""The records that `compare` returns."""

import dataclasses

from keras_efficient_attn.benchmark.analysis import crossover, log_log_slope
from keras_efficient_attn.benchmark.failures import OK
from keras_efficient_attn.benchmark.settings import MATMUL, SOFTMAX, Settings


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
