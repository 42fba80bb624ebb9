"""Runs checks that need several devices in separate processes.

JAX has eight virtual devices in one process, and PyTorch two processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

FOLDER = Path(__file__).parent
BACKEND = keras.backend.backend()
VIRTUAL_DEVICES = sorted(FOLDER.glob("virtual_devices/check_*.py"))
PROCESSES = sorted(FOLDER.glob("processes/check_*.py"))


def run(*command, **variables):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, **variables},
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
