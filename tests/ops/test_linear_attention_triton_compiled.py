"""The kernels for NVIDIA GPUs, compiled by Triton, which needs no GPU."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("the Triton kernels are PyTorch's", allow_module_level=True)
pytest.importorskip("triton")

from tests.ops.triton_compilation import CALLS, SHARED_MEMORY


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64",
    reason="Triton's compiler for NVIDIA GPUs is tested on Linux and x86-64",
)
def test_kernels_fit_the_registers_and_the_shared_memory(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [environment.get("PYTHONPATH")])]
    )
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_compilation.py"))],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    for numbers in kernels:
        print(numbers)
        head_dim, features, dtype, _ = numbers["call"]
        if numbers["arch"] in (80, 90) and head_dim == features and dtype == "bfloat16":
            assert numbers["spilled"] == 0
        assert numbers["shared"] <= SHARED_MEMORY[numbers["arch"]]
    compiled = {(numbers["arch"], tuple(numbers["call"])) for numbers in kernels}
    assert compiled == {(arch, call) for arch in SHARED_MEMORY for call in CALLS}
