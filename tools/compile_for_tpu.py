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

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import math
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
    SCHEDULE_OPTIONS,
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
    add(
        "--devices",
        nargs=2,
        type=int,
        metavar=("ROWS", "HEADS"),
        help="divide rows of the batch and heads over so many devices each, of a slice "
        "of as many; default: one device",
    )
    cli.add_files(parser, "a file of --save", "and the exit status is then 1")
    return vars(parser.parse_args(argv))


def main(argv=None):
    """Runs the command; returns its exit status."""
    try:
        arguments = parse_arguments(argv)
        names = "save", "against", "target", "devices"
        save, against, target, split = map(arguments.pop, names)
        settings = cli.make_settings({**arguments, "backend": "jax"})
        check_split(split, settings, target)
        if importlib.util.find_spec("libtpu") is None:
            raise cli.UsageError(
                "libtpu is not installed: pip install -e '.[tpu-compile]'"
            )
        before = cli.prepare_files(settings, save, against)
        if before is not None:
            same = [before.environment.get(name) for name in ("target", "devices")]
            if same != [target, split]:
                raise cli.UsageError(
                    f"--against {against}: has no estimates for {target} with "
                    f"--devices {split}"
                )
    except ValueError as error:
        return cli.refuse("compile_for_tpu", error)
    estimates = list(estimate_all(settings, target, split=split))
    print(table(settings, target, estimates, split))
    records = [estimate.record(settings.mode) for estimate in estimates]
    date = datetime.date.today().isoformat()
    environment = {"target": target, "devices": split, "date": date, **versions()}
    comparison = Comparison(settings, records, environment)
    if save is not None:
        write_json(comparison, save)
    if before is None:
        return 0
    print("\n" + slower(comparison, before))
    ratios = time_ratios(comparison, before).values()
    failed = any(record.status != OK for record in records)
    return int(failed or any(ratio > SLOWER for ratio in ratios))


def check_split(split, settings, target):
    """Raises `UsageError` unless the devices can share rows and heads."""
    if split is None:
        return
    (rows, heads), most = split, TARGETS[target].slices[-1][0]
    divides = min(split) > 0 and not (settings.batch % rows or settings.heads % heads)
    if not divides or rows * heads > most:
        raise cli.UsageError(
            f"--devices {rows} {heads}: must divide --batch {settings.batch} and "
            f"--heads {settings.heads}, and be at most {most} devices"
        )


def versions():
    """The versions that an estimate depends on, as a dict."""
    names = "libtpu", "jax", "keras"
    return {name: importlib.metadata.version(name) for name in names}


def estimate_all(settings, target, with_kernels=True, split=None):
    """Yields an `Estimate` for each layer and length, each from a new process.

    Args:
        settings: `Settings`.
        target: Name in `TARGETS`.
        with_kernels: Whether handwritten kernels have an estimate, too. A program with
            kernels is then compiled again, and the compiler takes longer to write its
            schedules than to compile it.
        split: `(rows, heads)`: how many devices divide each. Defaults to `None`: one.
    """
    for length in settings.lengths:
        for contestant in settings.layers:
            task = settings.task(contestant, length)
            request = {"task": task, "target": target, "split": split}
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
        workload = build_workload(request.pop("task"))
        compiled, seconds = compile_workload(workload, **request)
        return {**figures(compiled, workload, **request), "compile_seconds": seconds}
    except Exception as error:
        return describe_failure(error, building=True)


def compile_workload(workload, target, split=None, schedules=None):
    """The compiled program of a workload, and the seconds that compiling took.

    Args:
        workload: `Workload`.
        target: Name in `TARGETS`.
        split: As for `estimate_all`.
        schedules: The folder in which the compiler writes schedules, if it does.
    """
    target = TARGETS[target]
    inputs = workload.make_inputs(np.random.default_rng(0))
    scope, sharding_of = place(target, split)
    start = time.perf_counter()
    with plan_for(target.kind), scope:
        compiled = workload.program.compile_for(sharding_of, inputs)
    return compiled, time.perf_counter() - start


def place(target, split):
    """The scope of a program, and the function from a tensor to its sharding.

    Args:
        target: `Target`.
        split: As for `estimate_all`.
    """
    # The command names layers and targets without them.
    import jax
    import keras

    if split is None:
        (device,) = devices(target)
        sharding = jax.sharding.SingleDeviceSharding(device)
        return contextlib.nullcontext(), lambda x: sharding
    from keras_efficient_attn.models import EfficientTransformerBackbone

    names = "batch", "model"
    described = np.array(devices(target, math.prod(split))).reshape(split)
    mesh = keras.distribution.DeviceMesh(split, names, described)
    distribution = keras.distribution.ModelParallel(
        layout_map=EfficientTransformerBackbone.get_layout_map(mesh),
        batch_dim_name="batch",
    )

    def sharding_of(x):
        if isinstance(x, keras.Variable):
            axes = distribution.get_variable_layout(x).axes
        else:
            axes = distribution.get_data_layout(x.shape).axes
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.sharding.NamedSharding(mesh.backend_mesh, spec)

    return distribution.scope(), sharding_of


def figures(compiled, workload, target, split=None, schedules=None):
    """The figures of an `Estimate`, as a dict.

    Args:
        compiled: From `compile_workload`.
        workload, target, split: As there.
        schedules: The folder with the compiler's schedules of kernels. Defaults to
            `None`: kernels have no estimate.
    """
    target = TARGETS[target]
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
            each = useful / math.prod(split or (1,))
            share = each / (whole / target.clock) / target.peak
    return {
        "status": OK,
        "seconds": cycles / target.clock,
        "kernels": kernels,
        "kernel_seconds": kernel_seconds,
        "peak_share": share,
        "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
    }


def table(settings, target, estimates, split=None):
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
    devices_used = target if split is None else f"{split[0]} x {split[1]} {target}"
    about = (
        f"Estimates of the compiler for {devices_used} ({used}), not "
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
