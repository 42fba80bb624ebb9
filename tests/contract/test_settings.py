"""Keras' global settings change no layer, backbone or file that names its dtype."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import PerformerAttention, VQAttention
from tests.autodiff import gradients, to_numpy
from tests.contract.cases import inputs
from tests.models import cases as models
from tests.weight_gradients import loss_of_weights

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


@pytest.mark.parametrize("name", models.TASKS)
def test_tasks_and_their_files(name, tmp_path):
    task, x, _ = models.make_task(name, dtype="float32")
    task.save(tmp_path / "task.keras")
    expected = output_and_gradients(task, x)
    for option in SETTINGS:
        with setting(option):
            loaded = keras.saving.load_model(tmp_path / "task.keras")
            received = output_and_gradients(loaded, x)
        for one, other in zip(received, expected, strict=True):
            assert one.dtype == other.dtype
            scale = np.abs(other).max()
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale)


def output_and_gradients(task, x):
    """The output, and the gradients of weights; `fit` computes losses in floatx."""
    output = to_numpy(task(x))
    weight = np.random.default_rng(3).normal(size=output.shape).astype("float32")

    def loss():
        return ops.sum(ops.multiply(task(x), weight))

    loss, values = loss_of_weights(loss, task.trainable_variables)
    return [output, *gradients(loss, *values)]


def trained(make, seed, own_seed, trainable):
    """Weights and outputs in training, with dropout.

    Args:
        make: A layer's constructor.
        seed: For `keras.utils.set_random_seed`.
        own_seed: The layer's.
        trainable: Whether the trainable weights are those that the layer has drawn.
    """
    keras.utils.set_random_seed(seed)
    layer = make(dropout=0.5, seed=own_seed)
    x = ops.convert_to_tensor(inputs(length=8))
    layer.build(x.shape, x.shape)
    if not trainable:
        random = np.random.default_rng(0)
        for weight in layer.trainable_variables:
            weight.assign(random.normal(size=weight.shape).astype("float32"))
    outputs = [layer(x, x, training=True, use_causal_mask=True) for _ in range(2)]
    return [*map(to_numpy, layer.trainable_variables), *map(to_numpy, outputs)]


def check_seeds(make):
    def same(one, other):
        return all(map(np.array_equal, one, other))

    # A seed of its own: what a layer draws but its initialisers is the same.
    own = trained(make, 1, 1, trainable=False)
    assert same(own, trained(make, 2, 1, trainable=False))
    assert not same(own, trained(make, 1, 2, trainable=False))
    # None: the seed of all numbers says what it draws.
    free = trained(make, 1, None, trainable=True)
    assert same(free, trained(make, 1, None, trainable=True))
    other = trained(make, 2, None, trainable=True)
    kernels = sum(x.ndim > 1 and np.ptp(x) > 0 for x in free)
    differ = sum(not np.array_equal(x, y) for x, y in zip(free, other, strict=True))
    assert differ >= kernels > 4


@pytest.mark.once_a_layer
def test_seeds(case):
    check_seeds(case.make)


@pytest.mark.any_backend
def test_seeds_of_keras_own_layer():
    check_seeds(functools.partial(keras.layers.MultiHeadAttention, 2, 4))


def test_features_that_are_drawn_anew_follow_a_seed_of_their_own():
    check_seeds(functools.partial(PerformerAttention, 2, 4, redraw_interval=1))


def test_codes_are_drawn_alike():
    """In float16, the numbers of 65,504 keys and more would be infinite."""

    def codes():
        layer = VQAttention(
            2, 4, num_codes=5, codes={"revive_after": 1}, seed=1, dtype="float32"
        )
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
