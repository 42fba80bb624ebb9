"""Point 7: saved layers load unchanged."""

import keras
import numpy as np
import pytest

from tests.autodiff import to_numpy
from tests.contract.cases import DIM, inputs
from tests.saving import assert_same_model, saved_and_loaded


def make_model(case, **options):
    sequence = keras.Input((None, DIM))
    layer = case.make(**options)
    return keras.Model(sequence, layer(sequence, sequence, **case.plain))


def test_config_round_trip(case):
    layer = case.built()
    config = layer.get_config()
    restored = case.layer.from_config(config)
    assert restored.get_config() == config
    unbuilt = {**case.make(name=layer.name).get_config()}
    assert unbuilt == config
    serialized = keras.saving.serialize_keras_object(layer)
    package = case.layer.__module__.split(".")[0]
    assert serialized["registered_name"] == f"{package}>{case.layer.__name__}"


def test_whole_model_file(case, tmp_path):
    model = make_model(case)
    assert_same_model(saved_and_loaded(model, tmp_path), model, inputs())


@pytest.mark.once_a_layer
def test_weights_file(case, tmp_path):
    model, other, x = make_model(case), make_model(case, seed=9), inputs()
    assert np.abs(to_numpy(other(x)) - to_numpy(model(x))).max() > 1e-4
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(other, model, x)


@pytest.mark.once_a_layer
def test_quantised_model_file(case, tmp_path):
    model = make_model(case)
    model.quantize("int8")
    assert_same_model(saved_and_loaded(model, tmp_path), model, inputs())


@pytest.mark.once_a_layer
def test_saved_model_export(case, tmp_path, backend):
    if backend == "torch":
        pytest.skip("Keras exports no SavedModel from PyTorch")
    tensorflow = pytest.importorskip("tensorflow")
    model, x = make_model(case), inputs()
    model.export(tmp_path / "exported", format="tf_saved_model", verbose=False)
    exported = tensorflow.saved_model.load(str(tmp_path / "exported"))
    for length in (37, 5):
        served = exported.serve(x[:, :length]).numpy()
        np.testing.assert_allclose(
            served, to_numpy(model(x[:, :length])), rtol=1e-4, atol=1e-5
        )
