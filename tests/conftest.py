import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def backend():
    return keras.backend.backend()
