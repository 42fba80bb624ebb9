"""Quantised models load from their files: alone, inside others, and once more."""

import gc
import subprocess
import sys
from functools import partial

import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.models import (
    EfficientCausalLM,
    FeedForward,
    convert_backbone,
    replace_attention,
)
from tests.autodiff import to_numpy
from tests.models.cases import calibrate, inputs, make_backbone, make_task
from tests.saving import saved_and_loaded

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


@keras.saving.register_keras_serializable(package="tests")
class OwnBlock(keras.layers.Layer):
    """A user's layer that makes its layers, which are not in its configuration."""

    def __init__(self, attention="linear", **kwargs):
        super().__init__(**kwargs)
        self.kind = attention
        self.attention = get_attention(attention, num_heads=2, key_dim=4)
        self.feed_forward = FeedForward(12)

    def build(self, shape):
        self.attention.build(shape, shape)
        self.feed_forward.build(shape)

    def call(self, x):
        return self.feed_forward(x + self.attention(x, x))

    def get_config(self):
        return {**super().get_config(), "attention": self.kind}


@keras.saving.register_keras_serializable(package="tests")
class Around(keras.layers.Layer):
    """A user's layer with another in its configuration."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer
        self.inputs = 2 if isinstance(layer, keras.layers.MultiHeadAttention) else 1

    def call(self, x):
        return self.layer(*[x] * self.inputs)

    def get_config(self):
        layer = keras.saving.serialize_keras_object(self.layer)
        return {**super().get_config(), "layer": layer}

    @classmethod
    def from_config(cls, config):
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return cls(**{**config, "layer": layer})


def functional(layer):
    x = keras.Input((None, 8))
    return keras.Model(x, layer(x))


def replaced():
    attention = keras.layers.MultiHeadAttention(2, 4)
    model = functional(Around(Around(attention)))
    with pytest.warns(UserWarning, match="compiled again"):
        replace_attention(model, "linear")
    return model, X


def converted():
    backbone = keras_hub.models.GPT2Backbone(50, 1, 2, 8, 12, max_sequence_length=32)
    task = keras_hub.models.GPT2CausalLM(convert_backbone(backbone, "linear"))
    return task, inputs("softmax")


def task(name):
    model, data, _ = make_task(name, num_layers=1)
    return model, data


MODELS = {
    "own-layer": lambda: (functional(OwnBlock()), X),
    "around": lambda: (
        functional(Around(get_attention("linear", num_heads=2, key_dim=4))),
        X,
    ),
    "twice": lambda: (functional(Around(Around(OwnBlock("vq:num_codes=4")))), X),
    "nested-model": lambda: (functional(functional(OwnBlock())), X),
    "sequential": lambda: (keras.Sequential([keras.Input((None, 8)), OwnBlock()]), X),
    "universal": lambda: (make_backbone("universal"), inputs("universal")),
    "causal-lm": lambda: (
        EfficientCausalLM(make_backbone("softmax")),
        inputs("softmax"),
    ),
    **{name: partial(task, name) for name in ("classifier", "masked-lm", "seq2seq")},
    "replaced": replaced,
    "converted": converted,
}


TASKS = ("classifier", "masked-lm", "causal-lm", "seq2seq")


def nested_task():
    task, data = MODELS["causal-lm"]()
    x = {
        name: keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=name)
        for name, tensor in task.input.items()
    }
    return keras.Model(x, keras.layers.Dense(3)(task(x))), data


MODELS["nested-causal-lm"] = nested_task


def modes_of(model):
    return [layer.quantization_mode for layer in model._flatten_layers()]


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    # Keras collects garbage for each replaced weight, which takes seconds.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def assert_same(restored, model, data, tolerance=1e-5):
    assert modes_of(restored) == modes_of(model)
    expected = to_numpy(model(data))
    np.testing.assert_allclose(
        to_numpy(restored(data)), expected, atol=tolerance * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", MODELS)
def test_int8(name, tmp_path):
    model, data = MODELS[name]()
    model.quantize("int8")
    assert "int8" in modes_of(model)
    restored = saved_and_loaded(model, tmp_path)
    assert_same(restored, model, data)
    # What was loaded is saved as well, and its weights are those of the first file.
    assert_same(saved_and_loaded(restored, tmp_path), model, data)


@pytest.mark.any_backend
@pytest.mark.parametrize("mode", ["int4", "float8"])
@pytest.mark.parametrize(
    "name", ["own-layer", "twice", "universal", *TASKS, "nested-causal-lm"]
)
def test_other_modes(name, mode, tmp_path):
    model, data = MODELS[name]()
    model.quantize(mode)
    assert_same(saved_and_loaded(model, tmp_path), model, data)


@pytest.mark.any_backend
@pytest.mark.parametrize("name", ["twice", "causal-lm", "nested-causal-lm"])
def test_weights_alone_in_int8(name, tmp_path):
    model, data = MODELS[name]()
    whole = MODELS[name]()[0]
    whole.quantize("int8")
    model.quantize(
        config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    )
    assert np.abs(to_numpy(model(data)) - to_numpy(whole(data))).max() > 1e-4
    assert_same(saved_and_loaded(model, tmp_path), model, data)


@pytest.mark.any_backend
@pytest.mark.parametrize("name", ["own-layer", "twice", "masked-lm", "replaced"])
def test_a_part_and_lora(name, tmp_path):
    model, data = MODELS[name]()
    model.quantize("int8", filters="query|key")
    assert {"int8", None} == set(modes_of(model))
    for layer in model._flatten_layers():
        if layer.name == "query" and isinstance(layer, keras.layers.EinsumDense):
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(0.1 * np.ones(layer.lora_kernel_b.shape))
    # The file has the product of the factors in the kernel, in int8.
    restored = saved_and_loaded(model, tmp_path)
    assert_same(restored, model, data, tolerance=0.03)


@pytest.mark.any_backend
def test_weights_of_a_quantised_model(tmp_path):
    model, data = MODELS["own-layer"]()
    model.quantize("int8")
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = MODELS["own-layer"]()
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same(other, model, data)


@pytest.mark.any_backend
def test_a_configuration_inside_others():
    model = functional(Around(get_attention("linear", num_heads=2, key_dim=4)))
    model.quantize("int8")
    attention = model.layers[-1].layer
    config = attention.get_config()
    other = type(attention).from_config({**config, "name": "other"})
    functional(Around(Around(other)))
    assert modes_of(other) == modes_of(attention)
    assert other.get_config() == {**config, "name": "other"}


FRESH_PROCESS = """
import sys
from pathlib import Path
import keras, numpy as np
import tests.models.test_quantized_files
from tests.autodiff import to_numpy

for folder in map(Path, sys.argv[1:]):
    model = keras.saving.load_model(folder / "model.keras")
    data = dict(np.load(folder / "input.npz"))
    np.save(folder / "output.npy", to_numpy(model(data.get("x", data))))
"""


@pytest.mark.any_backend
def test_a_fresh_process(tmp_path):
    expected = {}
    for name, mode in (
        ("twice", "int8"),
        ("classifier", "int8"),
        ("causal-lm", "int4"),
        ("masked-lm", "float8"),
        ("seq2seq", "int4"),
        ("nested-causal-lm", "int4"),
    ):
        model, data = MODELS[name]()
        model.quantize(mode)
        folder = tmp_path / name
        folder.mkdir()
        model.save(folder / "model.keras")
        data = data if isinstance(data, dict) else {"x": data}
        np.savez(folder / "input.npz", **data)
        expected[folder] = to_numpy(model(data.get("x", data)))
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *expected], check=True)
    for folder, output in expected.items():
        received = np.load(folder / "output.npy")
        np.testing.assert_allclose(received, output, atol=1e-5, err_msg=folder.name)


@keras.saving.register_keras_serializable(package="tests")
class PlainBlock(keras.layers.Layer):
    """A layer of Keras' parts alone, whose `Dense` is not in its configuration."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(8)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


# The page on saving names these limits of Keras: where such a test fails, a newer Keras
# has mended one, and the page is to be changed.
@pytest.mark.any_backend
def test_keras_does_not_load_a_dense_layer_below_another(tmp_path):
    model = functional(PlainBlock())
    model.quantize("int8")
    with pytest.raises(ValueError, match="could not be loaded"):
        saved_and_loaded(model, tmp_path)
    # In the configuration, it loads.
    model = functional(Around(keras.layers.Dense(8)))
    model.quantize("int8")
    assert_same(saved_and_loaded(model, tmp_path), model, X)


@pytest.mark.any_backend
def test_keras_does_not_load_the_head_of_a_stock_task(tmp_path):
    def task():
        backbone = keras_hub.models.BertBackbone(
            50, 1, 2, 8, 12, max_sequence_length=32
        )
        return keras_hub.models.BertMaskedLM(backbone)

    model = task()
    model.quantize("int8")
    with pytest.raises(ValueError, match="could not be loaded"):
        saved_and_loaded(model, tmp_path)


def own_task():
    return EfficientCausalLM(make_backbone("softmax", vocabulary_size=256))


def stock_task():
    backbone = keras_hub.models.GPT2Backbone(256, 1, 2, 8, 12, max_sequence_length=32)
    return keras_hub.models.GPT2CausalLM(backbone)


@pytest.mark.any_backend
@pytest.mark.parametrize("make", [stock_task, own_task])
@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_keras_does_not_load_calibrated_modes(make, mode, tmp_path):
    model = make()
    calibrate(model, mode)
    with pytest.raises(ValueError, match="could not be loaded"):
        saved_and_loaded(model, tmp_path)
