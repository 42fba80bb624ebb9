"""Runs the tests on each backend, one process per backend, and prints one table.

Usage: python tests/run_matrix.py [BACKEND ...] [-- PYTEST ARGUMENTS]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / ".jax_cache"
# One run of all tests takes about 100 MiB.
MOST_BYTES = 2**29
BACKENDS = ("tensorflow", "jax", "torch")
OUTCOMES = ("passed", "failed", "skipped")


def run_backend(backend, arguments, report, last):
    """Exit status of pytest on one backend; the last one runs `any_backend`, too."""
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
    # Every process imports this package: the first one leaves it as bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2"]
    # Tests of a module share runs and what is compiled for them.
    command += ["--dist", "loadscope"]
    # In folder order: the last modules are short, so waiting is short.
    command += ["--no-loadscope-reorder"]
    # Warnings, mostly from Keras, would hide the failures.
    command += [f"--junitxml={report}", "--disable-warnings"]
    chosen = "not tpu_compile and not export"
    command += ["-m", chosen + ("" if last else " and not any_backend")]
    command += arguments
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


def main(arguments):
    if "--" in arguments:
        split = arguments.index("--")
        backends, pytest_arguments = arguments[:split], arguments[split + 1 :]
    else:
        backends, pytest_arguments = arguments, []
    if sum(file.stat().st_size for file in COMPILED.glob("*")) > MOST_BYTES:
        shutil.rmtree(COMPILED)
    rows, statuses = {}, []
    backends = backends or BACKENDS
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            print(f"== {backend}", flush=True)
            report = Path(folder, f"{backend}.xml")
            start = time.monotonic()
            last = backend == backends[-1]
            statuses.append(run_backend(backend, pytest_arguments, report, last))
            rows[backend] = {**count(report), "seconds": time.monotonic() - start}
    print(
        f"\n{'backend':<12}" + "".join(f"{name:>9}" for name in (*OUTCOMES, "seconds"))
    )
    for backend, row in rows.items():
        counts = "".join(f"{row[name]:>9}" for name in OUTCOMES)
        print(f"{backend:<12}{counts}{row['seconds']:>9.0f}")
    totals = {name: sum(row[name] for row in rows.values()) for name in OUTCOMES}
    print(", ".join(f"{totals[name]} {name}" for name in OUTCOMES))
    # A process that a signal ended has a negative status.
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
