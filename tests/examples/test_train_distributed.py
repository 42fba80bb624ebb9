"""The script that trains on several devices: tiny runs, each in its own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_distributed.py"
TINY = "--length 16 --dim 8 --heads 2 --layers 1 --steps 3 --batch 4 --devices 2"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *TINY.split(), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def losses(strategy):
    done = run("--strategy", strategy)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's devices")
def test_a_split_sequence_has_the_losses_of_one_device():
    # The other strategies are Keras' own; tests/distribution covers them.
    expected = losses("none")
    assert len(expected) == 3
    np.testing.assert_allclose(losses("sequence"), expected, rtol=1e-4)


@pytest.mark.any_backend
def test_what_devices_cannot_divide_is_refused():
    done = run("--strategy", "sequence", "--length", "15")
    assert done.returncode == 2
    assert "--devices 2 must divide --length 15" in done.stderr
