"""Compiler estimates for an accelerator that is not present.

`libtpu` compiles for a TPU that is described, not present: the compiled program states
its memory and the cycles that the compiler expects. Use it to compare two
implementations of one operation, to estimate memory, and to check whether a program
compiles at all.
"""

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import tempfile
import time

import keras
import numpy as np

from keras_efficient_attn.benchmark.failures import FAILED, OK
from keras_efficient_attn.benchmark.report import align, format_number
from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.benchmark.worker_process import WorkerDied, WorkerProcess
from keras_efficient_attn.ops.common.plan import plan_for


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator to compile for.

    Attributes:
        topology: The compiler's name for the smallest slice of this accelerator.
        kind: Device kind, used to choose the operations' plans.
        clock: Cycles per second.
        peak: Operations per second of products of bfloat16 matrices.
    """

    topology: str
    kind: str
    clock: float
    peak: float


# 4 matrix units of 128 by 128, each with a product and a sum per cycle.
TARGETS = {"tpu-v5e": Target("v5e:2x2", "tpu", 1.5e9, 197e12)}
# The compiler looks for no device, and JAX computes on the CPU.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Several processes may compile at a time: none of them holds a device.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
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


def check_can_compile_for(settings):
    """Raises `ValueError` for settings that cannot be estimated."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "--compile-for needs libtpu, which is not installed: pip install "
            "'keras-efficient-attn[tpu-compile]'"
        )
    if settings.backend != "jax":
        raise ValueError(
            f"--compile-for is for JAX. Received: --backend {settings.backend}"
        )
    if settings.mode == "decode" or settings.model or settings.peers:
        raise ValueError(
            "--compile-for takes layers and whole sequences. Received: "
            f"mode={settings.mode}, model={settings.model}, peers={settings.peers}"
        )
    for name in ("repeats", "time_limit"):
        if getattr(settings, name) != getattr(Settings, name):
            raise ValueError(
                f"--compile-for times nothing, and takes no `{name}`. Received: "
                f"{name}={getattr(settings, name)}"
            )


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
    worker = WorkerProcess("jax", environment=environment)
    try:
        worker.wait_for_start()
        return worker.request({"do": "compile", **request}, timeout=None)
    except WorkerDied as error:
        return {"status": FAILED, "detail": str(error)}
    finally:
        worker.close()


def compile_task(workload, target, schedules=None):
    """The worker's side: all fields of an `Estimate` except its name, as a dict.

    Args:
        workload: `Workload`.
        target: Name in `TARGETS`.
        schedules: The folder with the compiler's schedules of kernels. Defaults to
            `None`: kernels have no estimate.
    """
    from keras_efficient_attn.benchmark.execution import tpu

    target = TARGETS[target]
    inputs = workload.make_inputs(np.random.default_rng(0))
    start = time.perf_counter()
    with plan_for(target.kind):
        compiled = workload.program.compile_for(tpu.device(target.topology), inputs)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    cycles, kernels = tpu.estimated_cycles(text)
    whole = None if kernels else cycles
    if schedules is not None:
        kernel_cycles = tpu.kernel_cycles(text, pathlib.Path(schedules))
        whole, _ = tpu.estimated_cycles(text, kernel_cycles)
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
    about = (
        f"Estimates of the compiler for {target} (libtpu "
        f"{importlib.metadata.version('libtpu')}, JAX "
        f"{importlib.metadata.version('jax')}, Keras {keras.__version__}), not "
        f"measurements: {settings.mode}{', causal' if settings.causal else ''}, batch "
        f"{settings.batch}, {settings.heads} heads of {settings.head_dim}, "
        f"{settings.dtype}; kernel ms: by their schedules, not in ms; of peak: with "
        "kernels; MiB: temporaries"
    )
    return "\n".join([*align(rows), "", about])


def _milliseconds(seconds):
    return format_number(None if seconds is None else seconds * 1e3, ".3g")
