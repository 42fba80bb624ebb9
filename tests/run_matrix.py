"""Runs the tests on each backend, one process per backend, and prints one table.

Usage: python tests/run_matrix.py [--all] [BACKEND ...] [-- PYTEST ARGUMENTS]

By default it runs the gate. `--all` adds what is marked `nightly` and the variants of
layers on every backend, and runs the gate's part of the contract with nothing set that
speeds tests up.

For each backend it also prints the seconds of each folder of tests and the slowest
tests. The reports, with the duration of every test, stay in `runs/tests`.
"""

import collections
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / ".jax_cache"
REPORTS = ROOT / "runs" / "tests"
# One run of all tests takes about 100 MiB.
MOST_BYTES = 2**29
BACKENDS = ("tensorflow", "jax", "torch")
OUTCOMES = ("passed", "failed", "skipped")
MOST_SLOW = 20


def selection(everything, last):
    """The marks that pytest selects on a backend; the last runs what runs once."""
    left_out = ["tpu_compile", "export"]
    if not everything:
        left_out.append("nightly")
    if not last:
        left_out.append("any_backend")
        if not everything:
            left_out.append("one_backend")
    return " and ".join(f"not {mark}" for mark in left_out)


def run_backend(backend, arguments, report, marks, **settings):
    """Exit status of pytest on one backend."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        # The threads of two processes would slow each other down.
        "OMP_NUM_THREADS": "1",
        # JAX processes share compiled programs, also with the next run.
        "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment.update(settings)
    # Every process imports this package: the first one leaves it as bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2"]
    # Tests of a module share runs and what is compiled for them.
    command += ["--dist", "loadscope"]
    # In folder order: the last modules are short, so waiting is short.
    command += ["--no-loadscope-reorder"]
    # Warnings, mostly from Keras, would hide the failures.
    command += [f"--junitxml={report}", "--disable-warnings"]
    command += ["-m", marks, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def count(report):
    """Outcomes in a JUnit report; a run that wrote none has failed once."""
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    skipped = int(suite.get("skipped"))
    passed = int(suite.get("tests")) - failed - skipped
    return {"passed": passed, "failed": failed, "skipped": skipped}


def durations(report):
    """Seconds of each test in a JUnit report, by `folder/module::name`."""
    seconds = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.get("classname") is None:
            # The error that ended an interrupted run.
            continue
        # A module, and a class where tests have one.
        module = case.get("classname").removeprefix("tests.").replace(".", "/")
        seconds[f"{module}::{case.get('name')}"] = float(case.get("time"))
    return seconds


def print_durations(backend, report):
    """Prints the seconds of each folder and of the slowest tests."""
    if not report.exists():
        return
    seconds = durations(report)
    folders = collections.Counter()
    for name, duration in seconds.items():
        path = name.split("::")[0]
        folders[path.split("/")[0] if "/" in path else "tests"] += duration
    print(f"\n{backend}: seconds of tests, both processes together")
    for folder, duration in folders.most_common():
        print(f"{duration:>9.1f}  {folder}")
    print(f"{backend}: slowest tests")
    for name, duration in collections.Counter(seconds).most_common(MOST_SLOW):
        print(f"{duration:>9.1f}  {name}")


def runs(backends, everything, arguments):
    """`(name, backend, marks, arguments, settings)` of each run of pytest."""
    plain = everything and not arguments
    for backend in backends:
        marks = selection(everything, backend == backends[-1])
        marks += " and not main_contract" if plain else ""
        yield backend, backend, marks, arguments, {}
    for backend in backends if plain else ():
        settings = {"TESTS_WITH_DEFAULTS": "1"}
        yield f"{backend}-plain", backend, "main_contract", ["tests/contract"], settings


def main(arguments):
    everything = arguments[:1] == ["--all"]
    arguments = arguments[1:] if everything else arguments
    if "--" in arguments:
        split = arguments.index("--")
        backends, pytest_arguments = arguments[:split], arguments[split + 1 :]
    else:
        backends, pytest_arguments = arguments, []
    if sum(file.stat().st_size for file in COMPILED.glob("*")) > MOST_BYTES:
        shutil.rmtree(COMPILED)
    rows, statuses = {}, []
    backends = backends or BACKENDS
    REPORTS.mkdir(parents=True, exist_ok=True)
    for name, backend, marks, chosen, settings in runs(
        backends, everything, pytest_arguments
    ):
        print(f"== {name}", flush=True)
        report = REPORTS / f"{name}.xml"
        report.unlink(missing_ok=True)
        start = time.monotonic()
        statuses.append(run_backend(backend, chosen, report, marks, **settings))
        rows[name] = {**count(report), "seconds": time.monotonic() - start}
        print_durations(name, report)
    print(
        f"\n{'backend':<17}" + "".join(f"{name:>9}" for name in (*OUTCOMES, "seconds"))
    )
    for backend, row in rows.items():
        counts = "".join(f"{row[name]:>9}" for name in OUTCOMES)
        print(f"{backend:<17}{counts}{row['seconds']:>9.0f}")
    totals = {name: sum(row[name] for row in rows.values()) for name in OUTCOMES}
    print(", ".join(f"{totals[name]} {name}" for name in OUTCOMES))
    # A process that a signal ended has a negative status.
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
