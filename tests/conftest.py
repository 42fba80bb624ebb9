import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tests compile thousands of small programs and run each once: compile fast.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false",
)

import keras
import pytest


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def backend():
    return keras.backend.backend()
