import gc
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The softmax of oneDNN, which some CPUs get, refuses six axes; Keras has them.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Tests compile thousands of small programs and run each once: compile fast.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)
# Before anything imports Triton: its kernels run in its interpreter, without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Traced graphs are many objects and little garbage.
gc.set_threshold(50_000, 20, 20)

# Keras is imported where it is used: the process that hands out tests to others reads
# this file too, and needs no backend.


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    import keras

    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def backend():
    import keras

    return keras.backend.backend()


@pytest.fixture(autouse=True, scope="session")
def optimizers_are_built_before_steps_are_traced():
    """TensorFlow traces a step that creates variables a second time.

    Yields what Keras has, for tests that are to train as users do.
    """
    import keras

    make_train_function = keras.Model.make_train_function
    if keras.backend.backend() != "tensorflow":
        yield make_train_function
        return

    def build_first(model, force=False):
        optimizer = model.optimizer
        if model.built and not optimizer.built:
            optimizer.build(model.trainable_variables)
        return make_train_function(model, force)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "make_train_function", build_first)
        yield make_train_function
