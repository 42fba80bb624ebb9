"""Which conversions warn that the layers compute another function of the weights."""

import functools
import re
import warnings

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import convert_backbone, replace_attention, swap_report
from keras_efficient_attn.models.conversion.other_functions import random_inputs
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


def figures(message):
    """The errors that a warning gives, as strings."""
    return re.search(r"`swap_report`\) is ([^(]*) \(", message)[1].split(", ")


def expected_figures(report):
    errors = [f"{layer.attention:.2%}" for layer in report.layers if layer.replaced]
    return errors[:2]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_figures_are_those_of_the_report(name):
    backbone = families.make(name)
    attention = "linear:window=4,feature_map=taylor" if name == "t5" else "linear"
    efficient, found = messages(lambda: convert_backbone(backbone, attention))
    if name == "t5":
        # Its bias needs a window, which only layers that estimate softmax have.
        assert not found
        return
    (message,) = found
    data = random_inputs(backbone)
    report = swap_report(backbone, efficient, data)
    assert figures(message) == expected_figures(report)
    count = len(report.layers)
    assert "16 random tokens, not on data of the model" in message
    assert f"(in the first 2 of {count} such layers)" in message
    assert report.layers[1].attention > 0.01


@pytest.mark.any_backend
def test_random_inputs():
    backbone = families.make("bert")
    data = random_inputs(backbone)
    tokens = data.pop("token_ids")
    assert tokens.shape == (1, 16) and tokens.min() >= 0
    # Of the vocabulary of 50, and not of the two segments.
    assert 30 < tokens.max() < 50 and len(np.unique(tokens)) > 10
    np.testing.assert_array_equal(data.pop("padding_mask"), np.ones((1, 16)))
    np.testing.assert_array_equal(np.unique(data.pop("segment_ids")), [0, 1])
    assert not data
    again = random_inputs(families.make("bert", num_layers=1))
    np.testing.assert_array_equal(tokens, again["token_ids"])


@pytest.mark.any_backend
def test_a_worse_layer_has_a_larger_figure():
    backbone = families.make("gpt2", num_layers=1)
    errors = [
        figures(messages(lambda name=name: convert_backbone(backbone, name))[1][0])[0]
        # Sums grow with the number of keys.
        for name in ("linear", "linear:normalize=False")
    ]
    assert 3 * float(errors[0].rstrip("%")) < float(errors[1].rstrip("%"))


@pytest.mark.any_backend
def test_only_layers_that_do_not_estimate_softmax_are_measured():
    backbone = families.make("gpt2")
    attention = ["local:window=4", "linear"]
    efficient, (message,) = messages(lambda: convert_backbone(backbone, attention))
    layers = swap_report(backbone, efficient, random_inputs(backbone)).layers
    assert figures(message) == [f"{layers[1].attention:.2%}"]
    assert layers[0].attention != layers[1].attention
    assert "(in the first 1 of 1 such layers)" in message


@pytest.mark.any_backend
def test_the_original_runs_up_to_the_second_layer():
    backbone, called = families.make("gpt2", num_layers=4), []
    for index, layer in enumerate(backbone.transformer_layers):
        layer.call = functools.partial(record, called, index, layer.call)
    _, (message,) = messages(lambda: convert_backbone(backbone, "linear"))
    assert called == [0, 1] and "2 of 4 such layers" in message


def record(called, index, call, *args, **kwargs):
    called.append(index)
    return call(*args, **kwargs)


@pytest.mark.any_backend
def test_why_there_is_no_figure():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 4)

        def call(self, x):
            return self.attention(x, x)

    model = Model()
    model(np.zeros((1, 3, 8), "float32"))
    _, (message,) = messages(lambda: replace_attention(model, "linear"))
    assert "could not be measured: the inputs of" in message
    x = keras.Input((None,), dtype="int32", name="numbers")
    y = keras.ops.one_hot(x, 8)
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(y, y))
    _, (message,) = messages(lambda: replace_attention(model, "linear"))
    assert "could not be measured: the range of the integers 'numbers'" in message
    # The model's positions end before the random row does.
    backbone = families.make("gpt2", max_sequence_length=5)
    efficient, (message,) = messages(lambda: convert_backbone(backbone, "linear"))
    assert "could not be measured: " in message
    assert len(families.efficient_layers(efficient)) == 2


@pytest.mark.any_backend
@pytest.mark.parametrize("name, warns", [("linear", True), ("local", False)])
def test_replace_attention(name, warns):
    x = keras.Input((None, 8))
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
    data = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    before = keras.ops.convert_to_numpy(model(data))
    original = keras.models.clone_model(model)
    original.set_weights(model.get_weights())
    _, found = messages(lambda: replace_attention(model, name))
    assert bool(found) is warns
    if warns:
        report = swap_report(original, model, random_inputs(original))
        assert figures(found[0]) == expected_figures(report)
    error = np.abs(keras.ops.convert_to_numpy(model(data)) - before).max()
    assert (error > 1e-3) == warns
