"""Estimates of the TPU's compiler for attention layers, without a TPU.

    python -m tools.compile_for_tpu --layers linear vq --lengths 16384 --heads 8 \\
        --head-dim 128 --dtype mixed_bfloat16 --causal --mode train

`libtpu` compiles for a TPU that is described, not present: the compiled program states
its memory and the cycles that the compiler expects. Use it to compare two
implementations of one operation, to estimate memory, and to check whether a program
compiles at all. `--against` compares with an earlier run, such as that in
`tools/tpu_estimates.json`, and the exit status is then 1 if a layer has no estimate or
one over a tenth longer. It runs in the root of a checkout and needs the extra
`tpu-compile`.
"""

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import sys
import tempfile
import time

import numpy as np

from keras_efficient_attn.benchmark import cli
from keras_efficient_attn.benchmark.records import (
    FAILED,
    OK,
    SLOWER,
    Comparison,
    Record,
    describe_failure,
    time_ratios,
)
from keras_efficient_attn.benchmark.report import (
    align,
    format_number,
    slower,
    write_json,
)
from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.benchmark.worker_process import WorkerDied, WorkerProcess
from keras_efficient_attn.benchmark.workloads import build_workload
from keras_efficient_attn.ops.common.plan import plan_for
from tools.tpu_estimate import (
    ENVIRONMENT,
    TARGETS,
    devices,
    estimated_cycles,
    kernel_cycles,
)

# Whole sequences of layers.
MODES = ("forward", "train")
# The program of a process that compiles.
WORKER = """
from keras_efficient_attn.benchmark.worker import serve
from tools.compile_for_tpu import answer

serve(answer)
"""
# With these, and a folder, the compiler writes down its schedules.
SCHEDULE_OPTIONS = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles "
    "--xla_jf_dump_to="
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The compiler's estimate of one contestant at one length.

    Attributes:
        contestant: Name.
        length: Positions.
        status: `"ok"`, or the reason for a missing estimate.
        detail: A line about the status, or empty.
        seconds: Estimated seconds, without handwritten kernels.
        kernels: Number of handwritten kernels.
        kernel_seconds: Their seconds by the compiler's schedules, without stalls.
        peak_share: Useful operations per estimated second, as a share of the peak.
        temporary_bytes: Memory beside inputs and outputs.
        compile_seconds: Measured seconds of compiling.
    """

    contestant: str
    length: int
    status: str
    detail: str = ""
    seconds: float | None = None
    kernels: int = 0
    kernel_seconds: float | None = None
    peak_share: float | None = None
    temporary_bytes: int | None = None
    compile_seconds: float | None = None

    @property
    def total_seconds(self):
        """Estimated seconds, kernels included; `None` if theirs have no estimate."""
        if self.kernels and self.kernel_seconds is None:
            return None
        return self.seconds and self.seconds + (self.kernel_seconds or 0.0)

    def record(self, mode):
        """The estimate as the benchmark's `Record`."""
        return Record(
            self.contestant,
            "jax",
            mode,
            self.length,
            self.status,
            self.detail,
            seconds=self.total_seconds,
            compile_seconds=self.compile_seconds,
            memory_bytes=self.temporary_bytes,
            memory_kind="XLA temporaries",
            peak_share=self.peak_share,
        )


def parse_arguments(argv):
    parser = cli.Parser(
        prog="python -m tools.compile_for_tpu",
        usage="%(prog)s [options]",
        description="What the TPU's compiler expects of attention layers, at your "
        "shape, without a TPU; needs the extra tpu-compile.",
    )
    add = parser.add_argument
    cli.add_layers_and_shape(parser)
    add(
        "--mode",
        choices=MODES,
        default=Settings.mode,
        help="forward; train: with the gradients of inputs and weights; "
        "default: %(default)s",
    )
    add("--causal", action="store_true")
    add("--target", choices=TARGETS, default="tpu-v5e", help="default: %(default)s")
    cli.add_files(parser, "a file of --save", "and the exit status is then 1")
    return vars(parser.parse_args(argv))


def main(argv=None):
    """Runs the command; returns its exit status."""
    try:
        arguments = parse_arguments(argv)
        save, against, target = map(arguments.pop, ("save", "against", "target"))
        settings = cli.make_settings({**arguments, "backend": "jax"})
        if importlib.util.find_spec("libtpu") is None:
            raise cli.UsageError(
                "libtpu is not installed: pip install -e '.[tpu-compile]'"
            )
        before = cli.prepare_files(settings, save, against)
        if before is not None and before.environment.get("target") != target:
            raise cli.UsageError(f"--against {against}: has no estimates for {target}")
    except ValueError as error:
        return cli.refuse("compile_for_tpu", error)
    estimates = list(estimate_all(settings, target))
    print(table(settings, target, estimates))
    records = [estimate.record(settings.mode) for estimate in estimates]
    comparison = Comparison(settings, records, {"target": target, **versions()})
    if save is not None:
        write_json(comparison, save)
    if before is None:
        return 0
    print("\n" + slower(comparison, before))
    ratios = time_ratios(comparison, before).values()
    failed = any(record.status != OK for record in records)
    return int(failed or any(ratio > SLOWER for ratio in ratios))


def versions():
    """The versions that an estimate depends on, as a dict."""
    names = "libtpu", "jax", "keras"
    return {name: importlib.metadata.version(name) for name in names}


def estimate_all(settings, target, with_kernels=True):
    """Yields an `Estimate` for each layer and length, each from a new process.

    Args:
        settings: `Settings`.
        target: Name in `TARGETS`.
        with_kernels: Whether handwritten kernels have an estimate, too. A program with
            kernels is then compiled again, and the compiler takes longer to write its
            schedules than to compile it.
    """
    for length in settings.lengths:
        for contestant in settings.layers:
            request = {"task": settings.task(contestant, length), "target": target}
            reply = _compile(request)
            if with_kernels and reply.get("kernels"):
                seconds = reply["compile_seconds"]
                with tempfile.TemporaryDirectory() as folder:
                    reply = _compile({**request, "schedules": folder})
                if reply["status"] == OK:
                    # The second time includes the writing.
                    reply["compile_seconds"] = seconds
            yield Estimate(contestant, length, **reply)


def _compile(request):
    """The reply of a new process, because libtpu serves one at a time."""
    environment = dict(ENVIRONMENT)
    if "schedules" in request:
        environment["LIBTPU_INIT_ARGS"] = f"{SCHEDULE_OPTIONS}{request['schedules']}"
    worker = WorkerProcess("jax", [sys.executable, "-c", WORKER], environment)
    try:
        worker.wait_for_start()
        return worker.request(request, timeout=None)
    except WorkerDied as error:
        return {"status": FAILED, "detail": str(error)}
    finally:
        worker.close()


def answer(request):
    """The worker's side: the reply to a request; a failure is a reply too."""
    try:
        workload = build_workload(request["task"])
        return compile_workload(workload, request["target"], request.get("schedules"))
    except Exception as error:
        return describe_failure(error, building=True)


def compile_workload(workload, target, schedules=None):
    """All fields of an `Estimate` except contestant and length, as a dict.

    Args:
        workload: `Workload`.
        target: Name in `TARGETS`.
        schedules: The folder with the compiler's schedules of kernels. Defaults to
            `None`: kernels have no estimate.
    """
    target = TARGETS[target]
    inputs = workload.make_inputs(np.random.default_rng(0))
    device = devices(target.topology)[0]
    start = time.perf_counter()
    with plan_for(target.kind):
        compiled = workload.program.compile_for(device, inputs)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    cycles, kernels = estimated_cycles(text)
    whole = None if kernels else cycles
    if schedules is not None:
        of_kernels = kernel_cycles(text, pathlib.Path(schedules))
        whole, _ = estimated_cycles(text, of_kernels)
    useful, share, kernel_seconds = workload.operations, None, None
    if whole is not None:
        kernel_seconds = (whole - cycles) / target.clock
        if useful is not None:
            share = useful / (whole / target.clock) / target.peak
    return {
        "status": OK,
        "seconds": cycles / target.clock,
        "kernels": kernels,
        "kernel_seconds": kernel_seconds,
        "peak_share": share,
        "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        "compile_seconds": seconds,
    }


def table(settings, target, estimates):
    """The estimates as lines of text, with a legend."""
    rows = [
        (
            "contestant",
            "length",
            "ms",
            "kernels",
            "kernel ms",
            "of peak",
            "MiB",
            "compile s",
            "",
        )
    ]
    for item in estimates:
        notes = [item.status if item.status != OK else "", item.detail]
        rows.append(
            (
                item.contestant,
                f"{item.length}",
                _milliseconds(item.seconds),
                f"{item.kernels}",
                _milliseconds(item.kernel_seconds),
                format_number(item.peak_share, ".1%"),
                format_number(
                    item.temporary_bytes and item.temporary_bytes / 2**20, ".0f"
                ),
                format_number(item.compile_seconds, ".1f"),
                "; ".join(filter(None, notes)),
            )
        )
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    about = (
        f"Estimates of the compiler for {target} ({used}), not "
        f"measurements: {settings.mode}{', causal' if settings.causal else ''}, batch "
        f"{settings.batch}, {settings.heads} heads of {settings.head_dim}, "
        f"{settings.dtype}; kernel ms: by their schedules, not in ms; of peak: with "
        "kernels; MiB: temporaries"
    )
    return "\n".join([*align(rows), "", about])


def _milliseconds(seconds):
    return format_number(None if seconds is None else seconds * 1e3, ".3g")


if __name__ == "__main__":
    sys.exit(main())
