"""Compares attention layers: one process per contestant and length, in turns."""

import math
import time

from keras_efficient_attn.benchmark.records import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    SKIPPED,
    TIME_OUT,
    Comparison,
    Record,
)
from keras_efficient_attn.benchmark.settings import MATMUL, Settings
from keras_efficient_attn.benchmark.timing import median_and_spread, take_turns
from keras_efficient_attn.benchmark.worker_process import (
    WorkerDied,
    WorkerProcess,
    WorkerTimeout,
)

# A first call that runs out of memory or time will do so at longer lengths too.
ENDS_THE_RACE = (OUT_OF_MEMORY, TIME_OUT)


def compare(
    layers=Settings.layers,
    lengths=Settings.lengths,
    *,
    progress=None,
    start_worker=WorkerProcess,
    clock=time.perf_counter,
    **options,
):
    """Compares attention layers on this machine, at one shape and several lengths.

    Every contestant runs in a new process for each length. So memory starts from a
    fresh process, and a time-out or a lack of memory ends one point only. The processes
    compute one at a time, in turns, on new random inputs for every call. A square
    matmul runs with them and measures the machine's speed. If one runs out of memory,
    it is measured again when the other processes have ended, and so is one without a
    call in its time.

    Args:
        layers: Identifiers for `get_attention`. Defaults to `"softmax"`,
            `"performer:feature_map=elu"` and `"performer:feature_map=favor+"`.
        lengths: Sequence lengths. Defaults to 512, 1024, 2048 and 4096.
        **options: Further fields of `Settings`, below.
        progress: Optional callable from a number of steps to a progress bar, such as
            `keras.utils.Progbar`. Defaults to `None`: no progress bar.
        start_worker: Callable from a backend's name to a worker. Defaults to one that
            starts a process.
        clock: Callable that gives seconds.

    Further fields of `Settings`:
        heads: Number of heads. Defaults to 8.
        head_dim: Size of a head. Defaults to 64.
        batch: Batch size. Defaults to 1.
        dtype: Keras dtype policy. Defaults to `"float32"`.
        mode: `"forward"` (the default); `"train"`, with the gradients of the input and
            every weight; or `"decode"`, one position at a time after `length` others.
            Softmax then has a key/value cache.
        causal: Whether query `t` sees keys `0..t` only. Decoding and language models
            are always causal. Defaults to `False`.
        backend: Keras backend. Defaults to the current one.
        repeats: Timed calls. Defaults to 5.
        time_limit: Seconds of computing for a contestant at one length, compilation
            included. The checks get as many again. A contestant that exceeds it is
            skipped at longer lengths. Defaults to 60.
        model: Whether to compare small causal language models instead of layers: their
            training step with Adam, generation or loss. Needs KerasHub, which the extra
            `hub` installs. Defaults to `False`.
        matmul_size: Rows of the square matmul. Defaults to 2048, or 8192 on
            accelerators.
        seed: Seed of weights and inputs. Defaults to 0.

    Returns:
        `Comparison`. After an interrupt (Ctrl-C) it holds what was measured so far.

    Raises:
        ValueError: If an argument is invalid; the message names it.
        TypeError: For an argument that does not exist.

    Example:

    ```python
    from keras_efficient_attn import benchmark

    comparison = benchmark.compare(
        ["softmax", "performer:feature_map=elu"], [1024, 4096], causal=True
    )
    for record in comparison.records:
        print(record.contestant, record.length, record.status, record.seconds)
    ```
    """
    settings = Settings(layers=layers, lengths=lengths, **options)
    return run(settings, progress, start_worker, clock)


def run(settings, progress=None, start_worker=WorkerProcess, clock=time.perf_counter):
    """`compare` for checked settings."""
    contestants = [MATMUL, *settings.layers]
    # One step to prepare, one per repeat, and one for the checks.
    steps = len(contestants) * len(settings.lengths) * (settings.repeats + 2)
    bar = None if progress is None else progress(steps)
    records, environment, ended, complete = [], {}, {}, True
    try:
        for length in settings.lengths:
            points = [
                _Point(name, length, settings, ended.get(name)) for name in contestants
            ]
            try:
                _race(points, settings, start_worker, clock, bar, environment)
                scarce = any(point.status == OUT_OF_MEMORY for point in points)
                for i, point in enumerate(points):
                    # The others' processes took memory, or time by the lack of it.
                    if scarce and point.status in ENDS_THE_RACE:
                        alone = points[i] = _Point(point.name, length, settings, None)
                        _race([alone], settings, start_worker, clock, None, environment)
                        alone.add_detail("measured alone: no memory beside the others")
            except KeyboardInterrupt:
                for point in points:
                    point.interrupt()
                records += _records(points, settings)
                raise
            records += _records(points, settings)
            for point in points:
                if point.over_limit or point.status in ENDS_THE_RACE:
                    reason = "time-out" if point.over_limit else point.status
                    ended.setdefault(point.name, f"{reason} at length {length}")
    except KeyboardInterrupt:
        complete = False
    return Comparison(settings, records, environment, complete)


def _race(points, settings, start_worker, clock, bar, environment):
    """Measures all contestants at one length."""

    def step(count=1):
        if bar is not None:
            bar.add(count)

    try:
        for point in points:
            if point.status == OK:
                point.worker = start_worker(settings.backend)
        for point in points:
            if point.start(clock):
                environment.update(point.environment)
                point.prepare()
            step()

        def sample(point, _):
            seconds = point.repeat()
            step()
            return seconds

        take_turns(points, settings.repeats, sample)
        for point in points:
            point.check()
            # Count the turns that it missed as well.
            step(settings.repeats - point.turns + 1)
    finally:
        for point in points:
            point.close()


class _Point:
    """One contestant at one length, as the parent sees it."""

    def __init__(self, name, length, settings, ended):
        self.name, self.length = name, length
        self.status = SKIPPED if ended else OK
        self.detail = ended or ""
        self.worker = self.environment = None
        self.prepared, self.checked = {}, {}
        self.seconds, self.turns = [], 0
        self.over_limit = self._settled = False
        self._task = settings.task(name, length)
        self._limit = self._remaining = settings.time_limit

    def start(self, clock):
        """Waits for the process. Returns whether it started."""
        self._clock = clock
        if self.worker is None:
            return False
        self.environment = self._ask(self.worker.wait_for_start)
        return self.environment is not None

    def prepare(self):
        self.prepared = self._request({"do": "prepare", "task": self._task}) or {}
        if self.prepared and not self.prepared["finite"]:
            self.detail = "outputs are not finite"

    def repeat(self):
        """Seconds of a call; `None` once it has left the race."""
        self.turns += 1
        if self.status != OK or self._remaining <= 0:
            self.over_limit |= self._remaining <= 0
            return None
        reply = self._request({"do": "repeat", "turn": self.turns - 1})
        if reply is None:
            return None
        self.seconds.append(reply["seconds"] / self.prepared["steps"])
        return self.seconds[-1]

    def check(self):
        """Measures the error and completes the status."""
        asked = self._task["contestant"] != MATMUL
        self._settle()
        if self.status == OK and self.worker is not None and asked:
            self._remaining = self._limit
            timing = self.status, self.detail, self.over_limit
            self.checked = self._request({"do": "check"}) or {}
            if not self.checked:
                said = f"check: {self.status}"
                self.status, self.detail, self.over_limit = timing
                self.add_detail(said)

    def interrupt(self):
        """Completes the status of a race that ended early."""
        if self._settled:
            return
        self._settle()
        if self.status == OK and self.seconds:
            self.add_detail(f"interrupted after {len(self.seconds)} repeats")
        elif self.status == OK:
            self.status, self.detail = SKIPPED, "interrupted"

    def add_detail(self, text):
        """Appends a remark."""
        self.detail = f"{self.detail}; {text}".removeprefix("; ")

    def close(self):
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _settle(self):
        """Completes the status of the turns, once."""
        if self._settled:
            return
        self._settled = True
        if self.over_limit and self.seconds:
            self.status = OK
            self.detail = f"{len(self.seconds)} repeats within {self._limit:g} s"
        elif self.over_limit:
            self.status = TIME_OUT
            self.detail = f"no repeat within {self._limit:g} s"

    def _request(self, message):
        start = self._clock()
        limit = self._remaining
        reply = self._ask(lambda: self.worker.request(message, limit))
        self._remaining -= self._clock() - start
        self.over_limit |= self.status == TIME_OUT
        return reply

    def _ask(self, call):
        """The reply, or `None` and a status."""
        try:
            reply = call()
        except WorkerTimeout as error:
            self._fail(TIME_OUT, str(error))
        except WorkerDied as error:
            status = OUT_OF_MEMORY if error.killed else FAILED
            self._fail(status, str(error))
        else:
            if "status" not in reply:
                return reply
            self._fail(reply["status"], reply["detail"])
        return None

    def _fail(self, status, detail):
        self.status, self.detail = status, detail
        self.close()


def _records(points, settings):
    (matmul,) = (point for point in points if point.name == MATMUL)
    peak = None
    if matmul.status == OK:
        peak = matmul.prepared["operations"] / median_and_spread(matmul.seconds)[0]
    return [_record(point, settings, peak) for point in points]


def _record(point, settings, peak):
    told = {
        "contestant": point.name,
        "backend": settings.backend,
        "mode": settings.mode,
        "length": point.length,
        "status": point.status,
        "detail": point.detail,
    }
    if point.status != OK:
        return Record(**told)
    prepared = point.prepared
    median, low, high = median_and_spread(point.seconds)
    share = None
    if peak and prepared["operations"]:
        share = prepared["operations"] / median / peak
    return Record(
        **told,
        seconds=median,
        seconds_low=low,
        seconds_high=high,
        repeats=len(point.seconds),
        compile_seconds=max(prepared["first"] - median * prepared["steps"], 0.0),
        tokens_per_second=prepared["tokens"] / median,
        memory_bytes=prepared["memory_bytes"],
        memory_kind=prepared["memory_kind"],
        execution=prepared["execution"],
        peak_share=share,
        error=_number(point.checked.get("error")),
    )


def _number(value):
    """`None` if JSON cannot hold it; the detail then reports non-finite outputs."""
    return value if value is not None and math.isfinite(value) else None
