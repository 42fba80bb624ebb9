"""Measures layers on an NVIDIA GPU, with PyTorch and JAX, in at most nine minutes.

    make gpu WHEELS=folder      # or in an environment that has the packages: make gpu

It runs in the root of a checkout and needs no network. Results are written after each
measurement, in `runs/gpu`: `gpu.json`, and `gpu.md` with its tables, which `--table`
makes of any such file. The most important measurements come first, and what the time
does not allow is listed. A measurement that fails is recorded with its error. Each
backend has a process of its own, which the command stops when its time is over.
`--dry-run` runs the same with small sizes, for a machine without a GPU.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

# Keras is imported below, with a backend that is installed.
os.environ["KERAS_BACKEND"] = os.environ.get("KERAS_BACKEND") or (
    "torch" if importlib.util.find_spec("torch") else "jax"
)

import keras

from keras_efficient_attn import ops
from keras_efficient_attn.benchmark import cli
from keras_efficient_attn.benchmark.execution import make_program
from keras_efficient_attn.benchmark.layer_figures import BACKWARD
from keras_efficient_attn.benchmark.records import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    SKIPPED,
    TIME_OUT,
)
from keras_efficient_attn.benchmark.report import DASH, format_number
from keras_efficient_attn.benchmark.settings import MATMUL
from keras_efficient_attn.benchmark.timing import median_and_spread
from keras_efficient_attn.benchmark.worker_process import (
    WorkerDied,
    WorkerProcess,
    WorkerTimeout,
)
from keras_efficient_attn.benchmark.workloads import Workload, build_workload, draw
from keras_efficient_attn.layers import get_attention

NAMES = {"torch": "PyTorch", "jax": "JAX"}
BACKENDS = tuple(filter(importlib.util.find_spec, NAMES))
# The program of a process that measures.
WORKER = """
from keras_efficient_attn.benchmark.worker import Answers, serve
from tools.measure_gpu import build

serve(Answers(build).answer)
"""
FLA = "flash-linear-attention"
# Of the device itself: without these Triton interprets, and JAX rounds to TF32.
TEST_SETTINGS = {
    "TRITON_INTERPRET": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "PYTHONUNBUFFERED": "1",
}
OUTCOME = re.compile(
    r"(?P<id>tests/\S+::.*?) (?P<after>PASSED|FAILED|ERROR|SKIPPED)"
    r"|(?P<before>PASSED|FAILED|ERROR|SKIPPED) (?P<name>tests/\S+::.*)"
)
# Seconds of one measurement, of the start of a process, and those below which nothing
# begins.
MOST_SECONDS, START_SECONDS, LEAST_SECONDS = 120, 180, 5
# Processes of a backend that may fail to start.
MOST_STARTS = 2
# The share of the time left that tests may take.
TEST_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a run measures.

    Attributes:
        first: The layers that matter most.
        others: Further layers.
        length: The most important length.
        lengths: Further lengths.
        heads: Number of heads.
        dims: Sizes of a head, the most important first.
        repeats: Timed calls.
        matmul_size: As `Settings.matmul_size`.
        tests: Arguments of pytest.
        rivals: What layers are compared with on PyTorch: flash-linear-attention with
            elu + 1, and a layer without that package.
    """

    first: tuple
    others: tuple
    length: int
    lengths: tuple
    heads: int
    dims: tuple
    repeats: int
    matmul_size: int | None
    tests: tuple
    rivals: tuple


FULL = Sizes(
    first=("linear", "gated-delta", "softmax", "local", "performer", "vq"),
    others=("sparse", "kimi-delta", "gated-linear", "retention", "delta")
    + ("adaptive-span", "performer:window=128", "reformer"),
    length=16384,
    lengths=(65536, 1024, 4096, 32768),
    heads=16,
    dims=(64, 128),
    repeats=5,
    matmul_size=None,
    tests=("tests/ops/test_linear_attention_triton.py",)
    + ("tests/ops/test_gated_attention_fla.py", "tests/contract/test_oracle.py")
    + ("tests/contract/test_causality.py", "tests/contract/test_padding.py")
    + ("tests/contract/test_streaming.py", "tests/contract/test_documents.py")
    + ("tests/contract/test_dtypes.py",),
    rivals=(FLA, "gated-delta:chunk_size=128"),
)
DRY = Sizes(
    first=("linear", "softmax"),
    others=("local",),
    length=64,
    lengths=(32,),
    heads=2,
    dims=(16,),
    repeats=2,
    matmul_size=64,
    tests=("tests/contract/test_causality.py", "-k", "elu"),
    rivals=(FLA,),
)


def linear(query, key, value, rate):
    query, key = (keras.ops.elu(x) + 1 for x in (query, key))
    return ops.linear_attention(query, key, value, causal=True)


def gated_delta(query, key, value, rate):
    query, key = (keras.ops.normalize(x, axis=-1) for x in (query, key))
    rates = dict(log_decay=keras.ops.log_sigmoid(rate), beta=keras.ops.sigmoid(rate))
    return ops.linear_attention(
        query, key, value, causal=True, normalize=False, **rates
    )


def softmax(query, key, value, rate):
    return keras.ops.dot_product_attention(query, key, value, is_causal=True)


def local(query, key, value, rate):
    return ops.local_attention(query, key, value, window=128, causal=True)


# Operations alone, by the layer that has them: of queries, keys and values `(batch,
# length, heads, head_dim)`, and numbers `(batch, length, heads)`.
OPERATIONS = {
    "linear": linear,
    "gated-delta": gated_delta,
    "softmax": softmax,
    "local": local,
}


def build(task):
    """The `Workload` of a task from `plan`."""
    if not task["operation"]:
        return build_workload(task)
    rows = task["batch"], task["length"], task["heads"]
    shapes = [(*rows, task["head_dim"])] * 3 + [rows]
    train = task["mode"] == "train"
    if train:
        # The output's gradient comes first.
        shapes.insert(0, shapes[0])
    layer = get_attention(
        task["contestant"], num_heads=task["heads"], key_dim=task["head_dim"]
    )
    useful = task["batch"] * layer.operations(task["length"], True)
    return Workload(
        make_program(OPERATIONS[task["contestant"]], gradients=train),
        lambda rng: tuple(draw(rng, shape, "bfloat16") for shape in shapes),
        task["batch"] * task["length"],
        useful * (1 + BACKWARD) if train else useful,
    )


def plan(sizes):
    """The tasks and the tests of a run, the most important first.

    Yields:
        `(backend, task)`, or `None` for the tests.
    """

    def tasks(names, lengths, dim, mode="train", operation=False):
        for length in lengths:
            for name in names:
                for backend in BACKENDS:
                    if name in sizes.rivals and backend != "torch":
                        continue
                    yield (
                        backend,
                        dict(
                            contestant=name,
                            length=length,
                            heads=sizes.heads,
                            head_dim=dim,
                            mode=mode,
                            operation=operation,
                            module="tools.peers" if name == FLA else None,
                            batch=1,
                            dtype="mixed_bfloat16",
                            causal=True,
                            model=False,
                            matmul_size=sizes.matmul_size,
                            seed=0,
                        ),
                    )

    first, *rest = sizes.dims
    main = (sizes.length,)
    alone = tuple(name for name in sizes.first if name in OPERATIONS)
    yield from tasks((MATMUL, *sizes.first), main, first)
    yield None
    yield from tasks(sizes.rivals, main, first)
    yield from tasks(alone, main, first, operation=True)
    yield from tasks(sizes.first, sizes.lengths[:2], first)
    yield from tasks(sizes.first, main, first, "forward")
    for dim in rest:
        yield from tasks(sizes.first, main, dim)
        yield from tasks(alone, main, dim, operation=True)
    yield from tasks(sizes.others, main, first)
    yield from tasks(sizes.first, sizes.lengths[2:], first)
    for dim in rest:
        yield from tasks(sizes.first, sizes.lengths, dim)
    for dim in sizes.dims:
        yield from tasks(sizes.first, sizes.lengths, dim, "forward")
        yield from tasks(alone, main, dim, "forward", operation=True)


class Workers:
    """The processes that measure, one for each backend, until a deadline.

    Args:
        deadline: In seconds since 1970.
        device: How the name of the device begins that a process must compute on.

    Attributes:
        environments: What the processes say that they run on, by backend.
    """

    def __init__(self, deadline, device):
        self._deadline, self._device = deadline, device
        self.environments = {}
        # Those that have not started do so at the same time.
        self._processes = {backend: start_worker(backend) for backend in BACKENDS}
        self._started, self._failures = set(), dict.fromkeys(BACKENDS, 0)

    def left(self):
        """Seconds until the deadline."""
        return self._deadline - time.time()

    def measure(self, backend, task, repeats):
        """The fields of a row: a status, and times if it is `"ok"`."""
        if self._failures[backend] == MOST_STARTS:
            return {"status": SKIPPED, "detail": "its process does not start"}
        try:
            worker = self._ready(backend)
            device = self.environments[backend]["device"]
            if not device.startswith(self._device):
                return {"status": SKIPPED, "detail": f"the device is {device}"}
            return self._measure(worker, task, repeats)
        except WorkerTimeout:
            row = {"status": TIME_OUT, "detail": "no reply in time"}
        except WorkerDied as error:
            status = OUT_OF_MEMORY if error.killed else FAILED
            row = {"status": status, "detail": str(error)}
        self.close((backend,))
        return row

    def close(self, backends=BACKENDS):
        for backend in backends:
            if backend in self._processes:
                self._processes.pop(backend).close()
                self._started.discard(backend)

    def _ready(self, backend):
        """The process of a backend, which has started."""
        if backend not in self._processes:
            self._processes[backend] = start_worker(backend)
        worker = self._processes[backend]
        if backend not in self._started:
            self._failures[backend] += 1
            seconds = self._at_most(START_SECONDS)
            self.environments[backend] = worker.wait_for_start(seconds)
            self._failures[backend] = 0
            self._started.add(backend)
        return worker

    def _at_most(self, seconds):
        return max(min(seconds, self.left()), 0)

    def _measure(self, worker, task, repeats):
        end = time.time() + self._at_most(MOST_SECONDS)

        def ask(**message):
            return worker.request(message, max(end - time.time(), 0))

        prepared = reply = ask(do="prepare", task=task)
        seconds = []
        while "status" not in reply and len(seconds) < repeats:
            reply = ask(do="repeat", turn=len(seconds))
            if "status" not in reply:
                seconds.append(reply["seconds"] / prepared["steps"])
        if "status" in reply:
            if reply["status"] == OUT_OF_MEMORY:
                # Processes keep memory for later calls, also of one another.
                self.close()
            return reply
        median, low, high = median_and_spread(seconds)
        names = "memory_bytes", "memory_kind", "execution", "operations", "finite"
        return {
            "status": OK,
            "detail": "",
            "seconds": median,
            "seconds_low": low,
            "seconds_high": high,
            "repeats": len(seconds),
            "compile_seconds": max(prepared["first"] - median, 0.0),
            **{name: prepared[name] for name in names},
        }


def start_worker(backend):
    return WorkerProcess(backend, [sys.executable, "-c", WORKER])


def run_tests(arguments, seconds, out):
    """The outcomes of pytest with each backend, all at the same time, as a dict."""
    processes = {}
    for backend in BACKENDS:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        with open(out / f"tests_{backend}.txt", "w") as file:
            processes[backend] = subprocess.Popen(
                [*command, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **TEST_SETTINGS, "KERAS_BACKEND": backend},
                start_new_session=True,
            )
    end = time.time() + seconds
    try:
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.time(), 0))
    finally:
        for process in processes.values():
            # Also those that it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return {
        backend: {
            "exit_status": process.wait(),
            **outcomes((out / f"tests_{backend}.txt").read_text()),
        }
        for backend, process in processes.items()
    }


def outcomes(text):
    """The number of tests that passed, and the names of those that failed."""
    found = {}
    for match in OUTCOME.finditer(text):
        groups = match.groupdict()
        name = (groups["id"] or groups["name"]).strip()
        found.setdefault(name, groups["after"] or groups["before"])
    bad = {"FAILED", "ERROR"}
    return {
        "passed": sum(outcome == "PASSED" for outcome in found.values()),
        "skipped": sum(outcome == "SKIPPED" for outcome in found.values()),
        "failed": sorted(name for name, outcome in found.items() if outcome in bad),
    }


def tables(results):
    """The measurements as tables of a page, in Markdown."""
    groups, failures = {}, []
    backends = [
        backend
        for backend in NAMES
        if any(row["backend"] == backend for row in results["measurements"])
    ]
    for row in results["measurements"]:
        if row["status"] != OK:
            failures.append(
                f"- {label((row['backend'], row))}: {row['status']}: {row['detail']}"
            )
        if row["contestant"] != MATMUL:
            key = row["operation"], row["mode"], row["heads"], row["head_dim"]
            place = row["contestant"], row["length"]
            groups.setdefault(key, {}).setdefault(place, {})[row["backend"]] = row
    lines = [describe(results), ""]
    for (operation, mode, heads, dim), rows in groups.items():
        kind = "Operations" if operation else "Layers"
        lines += [f"{kind}, {mode}, {heads} heads of {dim}:", ""]
        header = ["layer", "positions"]
        for backend in backends:
            header += [f"{NAMES[backend]}, ms", "MiB", "of peak"]
        lines += [table_line(header), table_line(["---"] * len(header))]
        for (name, length), by_backend in sorted(rows.items()):
            cells = [f"`{name}`", f"{length:,}"]
            for backend in backends:
                cells += describe_cell(by_backend.get(backend))
            lines.append(table_line(cells))
        lines.append("")
    if failures:
        lines += ["Failed:", "", *failures, ""]
    if results["not_run"]:
        lines += ["Not run in this time:", ""]
        lines += [f"- {name}" for name in results["not_run"]]
    return "\n".join(lines).strip() + "\n"


def table_line(cells):
    return f"| {' | '.join(cells)} |"


def describe_cell(row):
    """Milliseconds, MiB and the share of the peak, or what went wrong."""
    if row is None:
        return [DASH] * 3
    if row["status"] != OK:
        return [row["status"], DASH, DASH]
    return [
        format_number(row["seconds"] * 1e3, ".3g"),
        f"{row['memory_bytes'] / 2**20:,.0f}",
        format_number(row["peak_share"], ".0%"),
    ]


def describe(results):
    """A paragraph about the run: machine, versions, and tests."""
    parts = [f"{results['date']}, batch 1, causal, bfloat16"]
    for backend, environment in results["environments"].items():
        parts.append(
            f"{NAMES[backend]} {environment['backend_version']} on "
            f"{environment['device']}"
        )
    for backend, tests in results["tests"].items():
        stopped = tests["exit_status"] == -signal.SIGKILL
        parts.append(
            f"tests with {NAMES[backend]}{', until their time was over' * stopped}: "
            f"{tests['passed']} passed, {len(tests['failed'])} failed, "
            f"{tests['skipped']} skipped"
        )
    return "; ".join(parts) + "."


def label(item):
    """A step of the plan in words."""
    if item is None:
        return "tests"
    backend, task = item
    kind = "operation" if task["operation"] else "layer"
    return (
        f"{NAMES[backend]}: {task['contestant']}, {kind}, {task['mode']}, "
        f"{task['length']:,} positions, {task['heads']} heads of {task['head_dim']}"
    )


def run(sizes, workers, out):
    """Measures what the time allows; returns the results, which are in `out`."""
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "environments": {},
        "tests": {},
        "measurements": [],
        "not_run": [],
    }
    todo, peaks = list(plan(sizes)), {}
    # However the run ends, its measurements are shown.
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(workers):
        for place, item in enumerate(todo):
            results["not_run"] = [label(later) for later in todo[place:]]
            write(results, out)
            if workers.left() < LEAST_SECONDS:
                break
            print(f"{workers.left():4.0f} s left: {label(item)}", flush=True)
            if item is None:
                seconds = TEST_SHARE * workers.left()
                results["tests"] = run_tests(sizes.tests, seconds, out)
                continue
            backend, task = item
            row = workers.measure(backend, task, sizes.repeats)
            if row["status"] == OK:
                speed = row["operations"] and row["operations"] / row["seconds"]
                if task["contestant"] == MATMUL:
                    peaks[backend] = speed
                known = speed and backend in peaks
                row["peak_share"] = speed / peaks[backend] if known else None
            else:
                print(f"    {row['status']}: {row['detail']}", flush=True)
            results["environments"] = workers.environments
            results["measurements"].append({"backend": backend, **task, **row})
        else:
            results["not_run"] = []
    write(results, out)
    return results


def write(results, out):
    """Writes `gpu.json` and `gpu.md`, each at once."""
    for name, text in (
        ("gpu.json", json.dumps(results, indent=1) + "\n"),
        ("gpu.md", tables(results)),
    ):
        unfinished = out / f"{name}.unfinished"
        unfinished.write_text(text)
        unfinished.replace(out / name)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure_gpu", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9, help="default: %(default)s")
    add("--since", type=float, help="where they begin, in seconds since 1970; now")
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu"))
    add("--dry-run", action="store_true", help="small sizes, also on a CPU")
    add("--table", type=pathlib.Path, help="only print the tables of this gpu.json")
    return parser.parse_args(argv)


def main(argv=None):
    """Runs the command; returns its exit status."""
    arguments = parse_arguments(argv)
    if arguments.table is not None:
        print(tables(json.loads(arguments.table.read_text())), end="")
        return 0
    if not BACKENDS:
        return cli.refuse("measure_gpu", "neither PyTorch nor JAX is installed")
    try:
        cli.make_folder(arguments.out, "--out")
    except cli.UsageError as error:
        return cli.refuse("measure_gpu", error)
    deadline = (arguments.since or time.time()) + 60 * arguments.minutes
    # Whatever hangs is interrupted.
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.alarm(max(int(deadline - time.time()) + LEAST_SECONDS, 1))
    sizes, device = (DRY, "") if arguments.dry_run else (FULL, "gpu")
    results = run(sizes, Workers(deadline, device), arguments.out)
    signal.alarm(0)
    print(f"\n{tables(results)}\nIn {arguments.out}: gpu.json, gpu.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
