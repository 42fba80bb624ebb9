"""Converted models are pickled and copied, whose classes exist only at run time."""

import copy
import pickle
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn.models import convert_backbone, replace_attention
from tests.autodiff import to_numpy
from tests.models.conversion import families


def converted():
    backbone = convert_backbone(families.make("gpt2", num_layers=1), "linear")
    return backbone, families.inputs(backbone)


def task():
    backbone, data = converted()
    return keras_hub.models.GPT2CausalLM(backbone), data


def replaced():
    x = keras.Input((None, 8))
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))
    with pytest.warns(UserWarning, match="compiled again"):
        replace_attention(model, "linear")
    return model, np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


def replaced_layer():
    layer = keras_hub.layers.TransformerEncoder(12, 2)
    layer.build((None, None, 8))
    with pytest.warns(UserWarning, match="compiled again"):
        replace_attention(layer, "linear")
    return layer, np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


MAKERS = {f.__name__: f for f in (converted, task, replaced, replaced_layer)}


def assert_same(restored, model, data):
    assert type(restored) is type(model) and restored is not model
    for one, other in zip(restored.weights, model.weights, strict=True):
        assert one is not other
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    np.testing.assert_allclose(
        to_numpy(restored(data)), to_numpy(model(data)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", MAKERS)
def test_pickle_and_copies(name):
    model, data = MAKERS[name]()
    pickled = pickle.dumps(model)
    assert_same(pickle.loads(pickled), model, data)
    # A second generation.
    assert pickle.dumps(pickle.loads(pickled))
    assert_same(copy.deepcopy(model), model, data)


@pytest.mark.any_backend
def test_a_trained_model_goes_on():
    model, data = replaced()
    model.compile("adam", "mse")
    model.train_on_batch(data, data)
    restored = pickle.loads(pickle.dumps(model))
    assert int(restored.optimizer.iterations) == 1
    restored.train_on_batch(data, data)


FRESH_PROCESS = """
import pickle, sys

with open(sys.argv[1], "rb") as file:
    models, inputs = pickle.load(file)
import keras

outputs = [keras.ops.convert_to_numpy(m(x)) for m, x in zip(models, inputs)]
with open(sys.argv[2], "wb") as file:
    pickle.dump(outputs, file)
"""


@pytest.mark.any_backend
def test_another_process_makes_the_classes(tmp_path):
    models, inputs = zip(converted(), replaced(), strict=True)
    files = tmp_path / "models.pickle", tmp_path / "outputs.pickle"
    files[0].write_bytes(pickle.dumps((models, inputs)))
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *map(str, files)], check=True)
    outputs = pickle.loads(files[1].read_bytes())
    for model, data, output in zip(models, inputs, outputs, strict=True):
        np.testing.assert_allclose(output, to_numpy(model(data)), atol=1e-5)
