"""Kills training of the byte model at random moments, and resumes it.

    KERAS_BACKEND=jax python -m tests.examples.kill_training --kills 10 --eager
    KERAS_BACKEND=jax python -m tests.examples.kill_training --devices 2

Every other kill comes while a checkpoint is written. No run may report a damaged
checkpoint, and the last weights must be bitwise those of a run that nothing disturbed.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_byte_lm.py"
EPOCH_STEPS = 2
OPTIONS = (
    "--length 32 --layers 1 --dim 16 --heads 2 --batch 8 "
    f"--epoch-steps {EPOCH_STEPS} --sample-bytes 5 --test-bytes 500 "
    "--attention performer:feature_map=elu"
).split()


# The test text is longer than 16 rows.
TEXT_BYTES = 11_000


# The script, with other arguments of `compile`, on several devices or one.
SCRIPT_WITH_OPTIONS = """
import functools, runpy, sys, keras
keras.Model.compile = functools.partialmethod(keras.Model.compile, **{compile_options})
if {devices} > 1:
    from keras_efficient_attn.models import EfficientTransformerBackbone
    # Not the batch: samples have one row.
    mesh = keras.distribution.DeviceMesh((1, {devices}), ("batch", "model"))
    layout_map = EfficientTransformerBackbone.get_layout_map(mesh)
    split = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    keras.distribution.set_distribution(split)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def script_command(compile_options, devices):
    """The command that runs the script with these options."""
    code = SCRIPT_WITH_OPTIONS.format(compile_options=compile_options, devices=devices)
    return [sys.executable, "-c", code, str(SCRIPT)]


def kill_at(moment, command, log):
    """Runs a command until `moment()` is true, and kills it.

    What the command prints is added to the file `log`.

    Returns:
        Whether it was killed; it may have ended before.
    """
    with open(log, "a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while process.poll() is None and not moment():
                time.sleep(0.001)
        finally:
            process.send_signal(signal.SIGKILL)
            status = process.wait()
    if status > 0:
        raise RuntimeError(Path(log).read_text())
    return status == -signal.SIGKILL


def after(seconds):
    """A moment: `seconds` from now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def while_saving(folder, count, delay):
    """A moment: `delay` seconds after the start of the `count`-th file from now."""
    start, files, end = time.time_ns(), set(), []

    def moment():
        for path in folder.glob("unfinished-checkpoint-*"):
            # It may already have its final name.
            with contextlib.suppress(FileNotFoundError):
                # A kill before this one may have left it.
                if path.stat().st_mtime_ns > start:
                    files.add(path.name)
        if len(files) >= count and not end:
            end.append(after(delay))
        return bool(end) and end[0]()

    return moment


def check_log(log):
    """Raises if one of the runs reported a damaged checkpoint."""
    reports = [line for line in log.read_text().splitlines() if "is damaged" in line]
    if reports:
        raise SystemExit("\n".join(reports))


def variables(folder):
    import keras

    model = keras.saving.load_model(folder / "model.keras")
    return [
        keras.ops.convert_to_numpy(variable)
        for variable in (*model.variables, *model.optimizer.variables)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of training; 8 for each kill")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true", help="compile no step")
    mode.add_argument("--xla", action="store_true", help="`jit_compile=True`")
    parser.add_argument(
        "--devices", type=int, default=1, help="virtual ones, of JAX: model parallel"
    )
    arguments = parser.parse_args()
    if arguments.devices > 1:
        # Read when JAX starts.
        os.environ["JAX_NUM_CPU_DEVICES"] = str(arguments.devices)
    compile_options = {}
    if arguments.eager:
        compile_options["run_eagerly"] = True
    if arguments.xla:
        compile_options["jit_compile"] = True
    draw = random.Random(arguments.seed)
    steps = arguments.steps or EPOCH_STEPS * 4 * arguments.kills
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        text = folder / "text"
        text.write_bytes(random.Random(0).randbytes(TEXT_BYTES))
        script = script_command(compile_options, arguments.devices)
        options = [*OPTIONS, "--steps", str(steps), "--text", text, "--resume"]
        command = [*script, *options, "--out"]
        whole, killed, log = folder / "whole", folder / "killed", folder / "log"
        start = time.monotonic()
        kill_at(lambda: list(whole.glob("checkpoint-*")), [*command, whole], log)
        seconds = time.monotonic() - start
        shutil.rmtree(whole)
        subprocess.run([*command, whole], check=True, capture_output=True)
        kills = 0
        while kills < arguments.kills:
            if kills % 2:
                delay = draw.uniform(0, 0.1)
                moment = while_saving(killed, draw.randint(1, 6), delay)
            else:
                moment = after(draw.uniform(0, 1.1 * seconds))
            if not kill_at(moment, [*command, killed], log):
                raise SystemExit(f"The run ended after {kills} kills: use more steps")
            kills += 1
            left = sorted(path.name for path in killed.glob("*checkpoint-*"))
            print(f"kill {kills}: {', '.join(left) or 'no file'}", flush=True)
        last = subprocess.run([*command, killed], check=True, capture_output=True)
        with open(log, "ab") as file:
            file.write(last.stdout)
        check_log(log)
        pairs = zip(variables(whole), variables(killed), strict=True)
        different = sum(not np.array_equal(one, other) for one, other in pairs)
        print(f"{kills} kills; {different} variables differ")
        raise SystemExit(bool(different))


if __name__ == "__main__":
    # The model's layers register themselves for `load_model`.
    sys.path.insert(0, str(SCRIPT.parent))
    import byte_lm.model  # noqa: F401

    main()
