"""The TPU's compiler divides every layer with kernels over several devices.

Run by `make test-accelerators`. A device runs a kernel for its rows and heads, so that
nothing of a sequence passes between devices but the sum over the heads of the output
projection, and of its gradient.
"""

import importlib.util

import pytest

from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.benchmark.workloads import build_workload
from tests.distribution.virtual_devices.programs import transfers
from tools.compile_for_tpu import compile_workload
from tools.tpu_estimate import ENVIRONMENT, estimated_cycles

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install -e '.[tpu-compile]'",
    ),
]
# Not the size of another axis.
LENGTH = 1536
ROWS, HEADS, DIM = 8, 16, 64
# Ranks of the projections of decays and gates in two factors.
NARROW = {"gated-linear": {16}, "kimi-delta": {DIM}}
LAYERS = [
    "linear",
    "performer",
    "performer:window=128",
    "retention",
    "gated-linear",
    "gated-delta",
    "kimi-delta",
    "local",
    "sparse",
    "adaptive-span",
    "vq",
]


@pytest.mark.parametrize(
    ("layer", "devices"),
    [(layer, (2, 2)) for layer in LAYERS]
    + [("linear", (4, 1)), ("linear", (4, 4)), ("gated-delta", (4, 4))],
)
def test_devices_run_kernels_for_their_rows_and_heads(layer, devices, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    settings = Settings(
        layers=(layer,),
        lengths=(LENGTH,),
        batch=ROWS,
        heads=HEADS,
        head_dim=DIM,
        dtype="mixed_bfloat16",
        mode="train",
        causal=True,
        backend="jax",
    )
    workload = build_workload(settings.task(layer, LENGTH))
    compiled, _ = compile_workload(workload, "tpu-v5e", devices)
    _, kernels = estimated_cycles(compiled.as_text())
    assert kernels > 0
    of_sequences = {
        (name, sizes) for name, sizes in transfers(compiled) if LENGTH in sizes
    }
    # The outputs, and the gradients of the inputs: of the query, and of key and value.
    own_rows = ROWS // devices[0], LENGTH, HEADS * DIM
    sums = {("all-reduce", own_rows)} if devices[1] > 1 else set()
    if layer in NARROW:
        # The gradients between the two factors of a projection, over the heads.
        sums |= {("all-reduce", (*own_rows[:2], rank)) for rank in NARROW[layer]}
    if layer == "vq":
        # The errors of the codes, a number for each position.
        sums.add(("all-reduce", own_rows[:2]))
    assert of_sequences == sums
