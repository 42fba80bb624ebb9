"""Plans for kinds of devices: the same results with other chunks."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import ops
from keras_efficient_attn.ops.common.chunking import chunk_layout
from keras_efficient_attn.ops.common.plan import BLOCK_SIZES, device_kind, plan_for
from keras_efficient_attn.ops.fourier import fourier_attention
from tests.autodiff import to_numpy

KINDS = sorted(BLOCK_SIZES)


def test_the_default_is_the_device_that_is_here():
    device = str(keras.ops.zeros(1).device).lower()
    here = "cpu" if "cpu" in device else "gpu"
    assert device_kind() == here
    with plan_for("tpu"), plan_for("gpu"):
        assert device_kind() == "gpu"
    assert device_kind() == here


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="kind='abacus'"):
        with plan_for("abacus"):
            pass


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_accelerators_take_all_chunks_at_once_while_they_fit(kind):
    floats = 16 * 5 * 128
    with plan_for(kind):
        *_, few_steps = chunk_layout(8192, 256, 1, floats)
        size, chunks, steps = chunk_layout(2**20, 256, 1, floats)
    assert few_steps <= 2
    assert size * chunks * floats <= BLOCK_SIZES[kind].step_floats * 4 / 3 and steps > 2
    *_, steps = chunk_layout(2**15, 64, 1, floats)
    assert steps > 50


def operations():
    x = np.random.default_rng(0).normal(size=(1, 700, 2, 8)).astype("float32")
    codebook = x[:, :16, :, :].swapaxes(1, 2)[0]
    positive = np.abs(x) + 0.1
    spans = np.array([3.0, 90.0], "float32")
    distances = x[0]
    return {
        "linear": lambda: ops.linear_attention(positive, positive, x, causal=True),
        "full": lambda: ops.linear_attention(positive, positive, x),
        "local": lambda: ops.local_attention(x, x, x, window=90, causal=True),
        "sparse": lambda: ops.sparse_attention(x, x, x, stride=20, causal=True),
        "vq": lambda: ops.vq_attention(x, x, x, codebook, window=30, causal=True),
        "span": lambda: ops.adaptive_span_attention(
            x, x, x, spans, window=128, causal=True
        ),
        "relative": lambda: ops.relative_attention(x, x, x, distances, causal=True),
        "fourier": lambda: fourier_attention(x, x, x, 0.5 * spans[:, None] / 3),
    }


@pytest.mark.parametrize("name", operations())
def test_every_plan_has_the_same_result(name):
    results = []
    for kind in KINDS:
        with plan_for(kind):
            results.append(to_numpy(operations()[name]()))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=2e-4, atol=2e-5)
