"""Streams 100,000 positions through every layer.

    KERAS_BACKEND=jax python -m tests.long_runs

Prints the errors of the outputs; the reference is float64 on PyTorch, in a separate
process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.long_runs.streams import CASES, measure, write_reference

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from tables import show  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, default=100_000)
    parser.add_argument("--segment", type=int, default=1, help="positions of a call")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--reference", metavar="FOLDER", help="keeps the reference")
    parser.add_argument("--only-reference", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the table, as JSON")
    arguments = parser.parse_args()
    arguments.command = ["-m", "tests.long_runs", *sys.argv[1:]]
    if arguments.only_reference:
        for name in arguments.cases:
            write_reference(CASES[name], arguments.positions, arguments.reference)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.reference or temporary)
        folder.mkdir(exist_ok=True)
        missing = [name for name in CASES if not (folder / f"{name}.npz").exists()]
        missing = [name for name in missing if name in arguments.cases]
        if missing:
            command = [sys.executable, "-m", "tests.long_runs", "--only-reference"]
            command += ["--positions", str(arguments.positions)]
            command += ["--reference", str(folder), "--cases", *missing]
            environment = {**os.environ, "KERAS_BACKEND": "torch"}
            subprocess.run(command, env=environment, check=True)
        rows = []
        for name in arguments.cases:
            for dtype in ("float32", "mixed_bfloat16"):
                row = measure(CASES[name], dtype, folder, arguments.segment)
                errors = [f"{row[key]:.1e}" for key in ("first", "last", "largest")]
                sizes = f"{row['state_bytes']:,}", f"{row['growth_mib']:.1f}"
                rows.append([name, dtype, *errors, *sizes])
                print(*rows[-1], flush=True)
        header = ["case", "dtype", "first", "last", "largest"]
        show([*header, "state bytes", "MiB more"], rows, arguments)


if __name__ == "__main__":
    main()
