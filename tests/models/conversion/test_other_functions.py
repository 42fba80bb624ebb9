"""Which conversions warn that the layers compute another function of the weights."""

import warnings

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import convert_backbone, replace_attention, swap_report
from tests.models.conversion import families

# Gated layers and the delta rule are refused.
OTHERS = ("linear", "fourier")
SOFTMAX = (
    "local:window=4",
    "sparse",
    "performer",
    "performer:feature_map=learned",
    "performer:window=4",
    "vq:window=4",
    "adaptive-span",
)


def messages(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught if "estimate" in str(w.message)]


@pytest.mark.any_backend
@pytest.mark.parametrize("name", OTHERS + SOFTMAX)
def test_convert_backbone(name):
    backbone = families.make("gpt2", num_layers=1)
    efficient, found = messages(lambda: convert_backbone(backbone, name))
    if name in SOFTMAX:
        assert not found
        return
    (message,) = found
    kind = type(efficient.attention_adapters[0].attention).__name__
    assert kind in message and "`swap_report(original, converted, inputs)`" in message


@pytest.mark.any_backend
def test_what_the_report_then_says():
    backbone = families.make("gpt2", num_layers=1)
    data = families.inputs(backbone)
    efficient, _ = messages(lambda: convert_backbone(backbone, "linear"))
    report = swap_report(backbone, efficient, data)
    assert report.layers[0].attention > 0.1


@pytest.mark.any_backend
@pytest.mark.parametrize("name, warns", [("linear", True), ("local", False)])
def test_replace_attention(name, warns):
    x = keras.Input((None, 8))
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
    data = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    before = keras.ops.convert_to_numpy(model(data))
    _, found = messages(lambda: replace_attention(model, name))
    assert bool(found) is warns
    error = np.abs(keras.ops.convert_to_numpy(model(data)) - before).max()
    assert (error > 1e-3) == warns
