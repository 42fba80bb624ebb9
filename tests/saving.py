"""Models that are saved and loaded."""

import keras
import numpy as np

from tests.autodiff import to_numpy


def saved_and_loaded(model, folder, custom_objects=None):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras", custom_objects)


def assert_same_model(restored, model, x, rtol=1e-5, atol=1e-6):
    """Equal weights; equal outputs up to rounding due to memory alignment."""
    for one, other in zip(restored.weights, model.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    np.testing.assert_allclose(
        to_numpy(restored(x)), to_numpy(model(x)), rtol=rtol, atol=atol
    )
