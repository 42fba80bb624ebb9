"""Batches split over devices, against one device."""

import keras
import numpy as np
import pytest

from tests.distribution.training import check_same, fit, make_model, weights_of

UNIVERSAL = dict(
    attention=["performer:num_features=16,redraw_interval=2"],
    recurrence=dict(num_recurrences=2, adaptive_computation={}),
)


@pytest.mark.parametrize("options", [{}, UNIVERSAL], ids=["stack", "pondering"])
def test_losses_and_weights_are_those_of_one_device(options):
    model = make_model(**options)
    before = weights_of(model)
    expected, expected_weights = fit(model), weights_of(model)
    assert any(
        np.abs(expected_weights[path] - x).max() > 1e-2
        for path, x in before.items()
        if "projection" in path
    )
    devices = [f"cpu:{i}" for i in range(4)]
    distribution = keras.distribution.DataParallel(devices=devices)
    with distribution.scope():
        model = make_model(**options)
        np.testing.assert_allclose(fit(model), expected, rtol=1e-4)
        check_same(weights_of(model), expected_weights)


OTHERS = [
    "linear:feature_map=hedgehog",
    "gated-delta",
    "softmax",
    "local:window=4",
    "sparse:stride=4",
    "fourier",
    "reformer",
]


def losses_of_other_layers():
    model = make_model(OTHERS)
    return fit(model), weights_of(model)


def test_layers_that_move_nothing_have_the_losses_of_one_device():
    expected, expected_weights = losses_of_other_layers()
    distribution = keras.distribution.DataParallel(
        devices=[f"cpu:{i}" for i in range(4)]
    )
    with distribution.scope():
        losses, weights = losses_of_other_layers()
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for path, value in weights.items():
        np.testing.assert_allclose(
            value, expected_weights[path], rtol=1e-3, atol=1e-4, err_msg=path
        )


def test_replicas_drop_different_weights():
    distribution = keras.distribution.DataParallel(
        devices=[f"cpu:{i}" for i in range(4)]
    )
    with distribution.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dropout(0.5)])
        ones = np.ones((4, 100), "float32")
        layout = distribution.get_data_layout(ones.shape)
        x = keras.distribution.distribute_tensor(ones, layout)
        dropped = np.asarray(model(x, training=True))
    # A row for each replica.
    assert len(np.unique(dropped, axis=0)) == 4
