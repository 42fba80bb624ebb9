"""Point 8: the same weights and inputs give the same outputs on every backend."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.contract import agreement


def test_outputs_agree_with_pytorch(backend, tmp_path):
    if backend == "torch":
        pytest.skip("the other backends are compared with it, and so all three")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    path = tmp_path / "outputs.npz"
    subprocess.run(
        [sys.executable, "-m", "tests.contract.agreement", path],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        cwd=Path(__file__).resolve().parents[2],
        check=True,
    )
    theirs = np.load(path)
    ours = agreement.outputs()
    assert sorted(ours) == sorted(theirs)
    for name, output in ours.items():
        size = np.abs(output).max()
        assert np.abs(output - theirs[name]).max() < 1e-5 * max(1.0, size), name
