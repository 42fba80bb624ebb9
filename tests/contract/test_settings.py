"""Keras' global settings change no layer, backbone or file that names its dtype."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import PerformerAttention, VQAttention
from keras_efficient_attn.models import EfficientCausalLM
from tests.autodiff import to_numpy
from tests.contract.cases import inputs
from tests.models import cases as models

SETTINGS = {
    "channels_first": ("image_data_format", "channels_first"),
    "float16": ("floatx", "float16"),
    "float64": ("floatx", "float64"),
    "epsilon": ("epsilon", 0.1),
    "policy": ("dtype_policy", "mixed_bfloat16"),
}


@contextlib.contextmanager
def setting(name):
    option, value = SETTINGS[name]
    before = getattr(keras.config, option)()
    set_option = getattr(keras.config, f"set_{option}")
    set_option(value)
    try:
        yield
    finally:
        set_option(before)


@pytest.mark.once_a_layer
def test_layers(case):
    layer, x = case.built(dtype="float32"), ops.convert_to_tensor(inputs(length=8))
    expected = to_numpy(layer(x, x, use_causal_mask=case.usual))
    for name in SETTINGS:
        with setting(name):
            again = case.built(dtype="float32")
            again.set_weights(layer.get_weights())
            received = to_numpy(again(x, x, use_causal_mask=case.usual))
        assert received.dtype == expected.dtype
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bytes", "mixed-rotary", "encoder-decoder"])
def test_backbones_and_their_files(name, tmp_path):
    backbone = models.make_backbone(name, dtype="float32")
    x = models.inputs(name)
    expected = [to_numpy(y) for y in keras.tree.flatten(backbone(x))]
    backbone.save(tmp_path / "model.keras")
    for option in SETTINGS:
        with setting(option):
            loaded = keras.saving.load_model(tmp_path / "model.keras")
            received = [to_numpy(y) for y in keras.tree.flatten(loaded(x))]
        for y, other in zip(received, expected, strict=True):
            assert y.dtype == other.dtype
            np.testing.assert_allclose(y, other, rtol=1e-5, atol=1e-6)


def test_a_task_and_its_file(tmp_path):
    task = EfficientCausalLM(models.make_backbone("bytes", dtype="float32"))
    x = models.inputs("bytes")
    expected = to_numpy(task(x))
    task.save(tmp_path / "task.keras")
    for option in SETTINGS:
        with setting(option):
            received = to_numpy(keras.saving.load_model(tmp_path / "task.keras")(x))
        assert received.dtype == expected.dtype
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_seeds_of_all_numbers_change_no_layer_with_a_seed_of_its_own():
    def output(seed):
        keras.utils.set_random_seed(seed)
        layer = PerformerAttention(2, 4, dropout=0.5, seed=1, redraw_interval=1)
        x = ops.convert_to_tensor(inputs(length=8))
        layer.build(x.shape, x.shape)
        for weight in layer.trainable_variables:
            values = np.random.default_rng(0).normal(size=weight.shape)
            weight.assign(values.astype("float32"))
        return to_numpy(layer(x, x, training=True))

    np.testing.assert_array_equal(output(1), output(2))


def test_codes_are_drawn_alike():
    """In float16, the numbers of 65,504 keys and more would be infinite."""

    def codes():
        layer = VQAttention(2, 4, num_codes=5, revive_after=1, seed=1, dtype="float32")
        x = ops.convert_to_tensor(inputs(length=8))
        layer.build(x.shape, x.shape)
        for weight in layer.trainable_variables:
            values = np.random.default_rng(0).normal(size=weight.shape)
            weight.assign(values.astype("float32"))
        for _ in range(4):
            layer(x, x, training=True)
        return to_numpy(layer.codebook)

    expected = codes()
    with setting("float16"):
        received = codes()
    np.testing.assert_allclose(received, expected, rtol=1e-5)
