"""Gates, compared with their formulae."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import GatedResidual
from keras_efficient_attn.models.blocks.residual import RESIDUALS
from tests.autodiff import to_numpy
from tests.dense import sigmoid

SHAPE = (2, 3, 4)


def gru(w, x, y):
    r = sigmoid(y @ w["reset_update"] + x @ w["reset_stream"])
    z = sigmoid(y @ w["gate_update"] + x @ w["gate_stream"] - w["bias"])
    h = np.tanh(y @ w["candidate_update"] + (r * x) @ w["candidate_stream"])
    return (1 - z) * x + z * h


def highway(w, x, y):
    g = sigmoid(x @ w["gate_stream"] + w["bias"])
    return g * x + (1 - g) * y


FORMULAE = {
    "gru": gru,
    "input": lambda w, x, y: sigmoid(x @ w["gate_stream"]) * x + y,
    "output": lambda w, x, y: x + sigmoid(x @ w["gate_stream"] - w["bias"]) * y,
    "highway": highway,
    "sigmoid_tanh": lambda w, x, y: (
        x
        + sigmoid(y @ w["gate_update"] - w["bias"]) * np.tanh(y @ w["candidate_update"])
    ),
}


def streams():
    return np.random.default_rng(0).normal(size=(2, *SHAPE)).astype("float32")


@pytest.mark.parametrize("gate", FORMULAE)
def test_a_gate_is_its_formula(gate):
    layer, (x, y) = GatedResidual(gate), streams()
    layer.build(x.shape, y.shape)
    random = np.random.default_rng(1)
    names = {w.name for w in layer.weights}
    assert ("bias" in names) == (gate != "input")
    assert len(layer.weights) == {"gru": 7, "input": 1, "sigmoid_tanh": 3}.get(gate, 2)
    if gate != "input":
        bias = next(w for w in layer.weights if w.name == "bias")
        np.testing.assert_array_equal(to_numpy(bias), np.full(4, 2.0))
    for weight in layer.weights:
        weight.assign(random.normal(size=weight.shape))
    weights = {w.name: to_numpy(w).astype("float64") for w in layer.weights}
    expected = FORMULAE[gate](weights, *(t.astype("float64") for t in (x, y)))
    np.testing.assert_allclose(to_numpy(layer(x, y)), expected, rtol=1e-4, atol=1e-5)


def test_a_large_bias_keeps_the_stream():
    x, y = streams()
    for gate in ("gru", "output", "highway", "sigmoid_tanh"):
        output = to_numpy(GatedResidual(gate, bias=30.0)(x, y))
        np.testing.assert_allclose(output, x, atol=1e-5)


def test_configuration_and_half_precision():
    layer = GatedResidual("highway", bias=1, dtype="mixed_bfloat16")
    restored = GatedResidual.from_config(layer.get_config())
    assert (restored.gate, restored.bias) == ("highway", 1)
    output = restored(*streams())
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    assert {str(w.dtype) for w in restored.weights} == {"float32"}


def test_the_block_of_gtrxl():
    """Norm on the sublayer's input, ReLU on its output, a gate for the sum."""
    residual = RESIDUALS["gated"]("layer_norm", 1e-5, True, 0.0)
    x, update = streams()
    residual.build(x.shape)
    mean = x.mean(-1, keepdims=True)
    normed = (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        to_numpy(residual.before(x)), normed, rtol=1e-4, atol=1e-5
    )
    weights = {w.name: to_numpy(w) for w in residual.residual.weights}
    expected = gru(weights, x, np.maximum(update, 0))
    np.testing.assert_allclose(
        to_numpy(residual.after(x, update)), expected, rtol=1e-4, atol=1e-5
    )


def test_each_gate_has_a_residual():
    gated = (RESIDUALS[name] for name in RESIDUALS if name.startswith("gated"))
    gates = {residual.keywords["gate"] for residual in gated}
    assert gates == set(FORMULAE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "none"}, "gate='none'"),
        ({"bias": "2"}, "bias='2'"),
        ({"gate": "input", "bias": 1.0}, "bias=1.0"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    with pytest.raises(ValueError, match=message):
        GatedResidual(**options)


def test_lengths_may_be_unknown():
    x, y = streams()
    inputs = keras.Input((None, SHAPE[-1])), keras.Input(SHAPE[1:])
    layer = GatedResidual("input")
    model = keras.Model(inputs, layer(*inputs))
    kernel = to_numpy(layer.weights[0])
    expected = FORMULAE["input"]({"gate_stream": kernel}, x, y)
    np.testing.assert_allclose(to_numpy(model([x, y])), expected, rtol=1e-4, atol=1e-5)


def test_shapes_that_differ():
    x, y = streams()
    with pytest.raises(ValueError, match=r"y\.shape=\(2, 3, 2\)"):
        GatedResidual()(x, y[..., :2])
