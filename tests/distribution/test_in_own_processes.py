"""Runs checks that need several devices in separate processes.

JAX has eight virtual devices in one process, and PyTorch two processes.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest

FOLDER = Path(__file__).parent
BACKEND = keras.backend.backend()
VIRTUAL_DEVICES = sorted(FOLDER.glob("virtual_devices/check_*.py"))
PROCESSES = sorted(FOLDER.glob("processes/check_*.py"))
# Processes that wait for each other wait for ever.
SECONDS = 900


def run(*command, seconds=SECONDS, **variables):
    """Runs a module; it and all that it starts end after `seconds`."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, **variables},
        cwd=FOLDER.parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end in {seconds} s:\n{output}")
    assert process.returncode == 0, output


@pytest.mark.any_backend
def test_processes_that_hang_are_ended_and_said_to():
    # The process that hangs is not the one that was started, and has its output open.
    hang = "import subprocess; subprocess.run(['sleep', '100'])"
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="did not end in 2 s"):
        run("timeit", "-n1", "-r1", hang, seconds=2)
    assert time.monotonic() - start < 50


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's devices")
@pytest.mark.parametrize("path", VIRTUAL_DEVICES, ids=lambda path: path.stem)
def test_on_eight_devices(path):
    command = "pytest", "-q", "-p", "no:cacheprovider", path
    run(*command, JAX_NUM_CPU_DEVICES="8", JAX_PLATFORMS="cpu")


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's processes")
@pytest.mark.parametrize("path", PROCESSES, ids=lambda path: path.stem)
def test_in_two_processes(path):
    module = f"tests.distribution.processes.{path.stem}"
    run("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", module)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's devices")
def test_on_two_replicas_of_a_strategy():
    run("tests.distribution.mirrored")
