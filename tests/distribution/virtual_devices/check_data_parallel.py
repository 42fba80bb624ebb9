"""Batches split over devices, against one device."""

import jax
import keras
import numpy as np
import pytest

from tests.distribution.training import (
    MODELS,
    REVIVED,
    UNIVERSAL,
    check_moved,
    check_revived,
    check_same,
    codes_of,
    fit,
    make_batches,
    make_model,
    train,
    weights_of,
)

# In float32, rounding errors grow beyond the tolerance within five steps.
jax.config.update("jax_enable_x64", True)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


def data_parallel():
    devices = [f"cpu:{i}" for i in range(4)]
    return keras.distribution.DataParallel(devices=devices)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_those_of_one_device(name):
    expected = train(name)
    with data_parallel().scope():
        received = train(name)
    check_same(received, expected)


def test_training_redraws_features():
    model = make_model(**UNIVERSAL)
    before = weights_of(model)
    fit(model, make_batches())
    check_moved(weights_of(model), before, "projection")


def test_codes_are_revived_as_on_one_device():
    def revive():
        model = make_model(REVIVED)
        losses = fit(model, make_batches())
        return losses, weights_of(model)

    expected = revive()
    check_revived(codes_of(expected[1]), make_batches())
    with data_parallel().scope():
        received = revive()
    check_same(received, expected)


def test_replicas_drop_different_weights():
    distribution = data_parallel()
    with distribution.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dropout(0.5)])
        ones = np.ones((4, 100), "float32")
        layout = distribution.get_data_layout(ones.shape)
        x = keras.distribution.distribute_tensor(ones, layout)
        dropped = np.asarray(model(x, training=True))
    # A row for each replica.
    assert len(np.unique(dropped, axis=0)) == 4
