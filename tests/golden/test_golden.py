"""Golden files: models that were saved load, and give the outputs that they gave.

`write.py` writes the files. The code that wrote them is not needed to read them, but
what it registered with Keras is.
"""

import keras
import numpy as np
import pytest

import tests.contract.cases  # noqa: F401  registers `squared_relu`
from tests.golden.running import FILES, OUTPUT, outputs_of

NAMES = sorted(path.stem for path in FILES.glob("*.keras"))


# A task is compiled when it is made, and the files hold no optimizers.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_gives_its_outputs(name):
    model = keras.saving.load_model(FILES / f"{name}.keras", compile=False)
    arrays = dict(np.load(FILES / f"{name}.npz"))
    received = outputs_of(model, arrays)
    expected = {
        key.removeprefix(OUTPUT): array
        for key, array in arrays.items()
        if key.startswith(OUTPUT)
    }
    assert received.keys() == expected.keys()
    for key, array in expected.items():
        assert received[key].shape == array.shape, key
        if np.issubdtype(array.dtype, np.integer):
            np.testing.assert_array_equal(received[key], array, err_msg=key)
            continue
        # Each backend rounds its own way.
        tolerance = 1e-5 * max(1.0, np.abs(array).max())
        np.testing.assert_allclose(
            received[key], array, rtol=1e-4, atol=tolerance, err_msg=key
        )


def test_there_are_files():
    assert len(NAMES) > 50
