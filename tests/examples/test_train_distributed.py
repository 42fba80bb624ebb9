"""The script that trains on several devices: tiny runs, each in its own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import train_distributed

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_distributed.py"
TINY = "--length 16 --dim 8 --heads 2 --layers 1 --steps 3 --batch 4 --devices 2"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *TINY.split(), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def losses(strategy, *arguments):
    done = run("--strategy", strategy, *arguments)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's devices")
def test_every_strategy_has_the_losses_of_one_device():
    expected = losses("none")
    assert len(expected) == 3
    for strategy in ("data", "model", "sequence"):
        np.testing.assert_allclose(losses(strategy), expected, rtol=1e-4)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's devices")
def test_heads_that_devices_do_not_divide_are_whole_on_each():
    shared = "--attention", "linear:num_key_value_heads=1"
    expected = losses("none", *shared)
    np.testing.assert_allclose(losses("model", *shared), expected, rtol=1e-4)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "strategy, options, message",
    [
        ("sequence", "--length 15", "--devices 2 must divide --length 15"),
        ("data", "--batch 3", "--devices 2 must divide --batch 3"),
        ("model", "--heads 1", "--devices 2 must divide --heads 1"),
        (
            "model",
            "--devices 3 --heads 3 --dim 9",
            "--devices 3 must divide the 256 values of a byte",
        ),
    ],
)
def test_what_devices_cannot_divide_is_refused(error_line, strategy, options, message):
    arguments = ["--strategy", strategy, *TINY.split(), *options.split()]
    assert message in error_line(train_distributed, arguments)
