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
