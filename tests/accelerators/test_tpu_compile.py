"""The TPU's compiler compiles every attention layer, forward and backward.

Run by `make test-accelerators`; the compiler takes half a minute per layer, and longer
where it writes the schedules of kernels.
"""

import importlib.util
import json

import pytest

from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.layers import attention_names
from tools import compile_for_tpu
from tools.compile_for_tpu import estimate_all, table

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install -e '.[tpu-compile]'",
    ),
]
LENGTH = 16384
GIB = 2**30
# Every layer, and options that compile to other programs.
LAYERS = [
    *attention_names(),
    "fourier:linear=True,num_frequencies=8",
    "performer:window=128",
    "sparse:pattern=fixed",
]
# Their temporaries may grow with the square of the length.
QUADRATIC = {"softmax", "fourier", "xl"}


@pytest.mark.parametrize("layer", LAYERS)
def test_it_compiles_for_a_tpu(layer):
    settings = Settings(
        layers=(layer,),
        lengths=(LENGTH,),
        heads=8,
        head_dim=128,
        dtype="mixed_bfloat16",
        mode="train",
        causal=True,
        backend="jax",
    )
    # The compiler takes longer to write schedules than to compile: one layer's kernels.
    with_kernels = layer == "linear"
    estimates = list(estimate_all(settings, "tpu-v5e", with_kernels))
    print(table(settings, "tpu-v5e", estimates).partition("\n\n")[0])
    (estimate,) = estimates
    assert estimate.status == "ok", estimate.detail
    assert estimate.seconds > 0
    if with_kernels:
        assert estimate.kernels > 0
        # No faster than the chip.
        assert 0.01 < estimate.peak_share < 1
    # Memory grows with the length, or with its power of 1.5.
    if layer not in QUADRATIC:
        assert estimate.temporary_bytes <= 2 * GIB


def test_the_command_says_how_near_the_peak_a_layer_comes(tmp_path, capsys):
    # A layer without handwritten kernels, whose cycles would not be known.
    arguments = ["--layers", "softmax", "--lengths", "512", "--heads", "2"]
    arguments += ["--head-dim", "128", "--dtype", "mixed_bfloat16", "--causal"]
    arguments += ["--save", str(tmp_path / "estimates.json")]
    assert compile_for_tpu.main(arguments) == 0
    assert "not measurements" in capsys.readouterr().out
    content = json.loads((tmp_path / "estimates.json").read_text())
    (estimate,) = content["records"]
    assert estimate["status"] == "ok"
    # At most as fast as the chip, and at most a hundred times slower.
    assert 0.01 < estimate["peak_share"] < 1
