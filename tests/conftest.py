import contextlib
import functools
import gc
import importlib.util
import os
import weakref
from importlib.metadata import version

import pytest

from tests.suites import LEAVES_THE_GATE, marks_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN's softmax, used on some CPUs, does not support Keras' six axes.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Whether tests run as users do: no flag and no patch that makes them faster.
WITH_DEFAULTS = "TESTS_WITH_DEFAULTS" in os.environ
# Tests compile thousands of small programs and run each once: compile fast.
XLA_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.util.find_spec("jax") is None or version("jaxlib").startswith("0.10."):
    # A process ends at a flag that its XLA does not know; JAX 0.11 has no such choice.
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if not WITH_DEFAULTS:
    os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
# Set before Triton is imported: its kernels run in the interpreter, without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Traced graphs have many objects and little garbage.
gc.set_threshold(50_000, 20, 20)

# Keras is imported where it is used: the process that distributes tests also reads this
# file and needs no backend.


def pytest_collection_modifyitems(items):
    """Marks what leaves the gate, and the gate's contract; see `tests.suites`."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for mark in marks_of(name):
            item.add_marker(mark)
        leaves = any(map(item.get_closest_marker, LEAVES_THE_GATE))
        if name.startswith("contract/") and not leaves:
            item.add_marker("main_contract")


@pytest.fixture(autouse=True)
def searches_for_garbage_are_short():
    """Leaves what earlier tests hold, millions of objects in caches, out of them.

    Keras searches whenever a layer deletes a variable, five times a quantised layer.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    import keras

    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def backend():
    import keras

    return keras.backend.backend()


@pytest.fixture
def on_cpu():
    """Keeps a test on the CPU of a machine that has a GPU."""
    import keras

    from keras_efficient_attn.ops.common.plan import plan_for

    with keras.device("cpu"), plan_for("cpu"):
        yield


@pytest.fixture(autouse=True, scope="session")
def short_training_is_not_traced():
    """On TensorFlow, models that are compiled by default run their steps eagerly.

    Tracing takes longer than the few steps of a test. A test of compiled steps sets
    `jit_compile=True` or `False`. Optimizers are built first, because TensorFlow traces
    a step that creates variables twice.

    Yields a context without this, for code that must train as users do.
    """
    import keras

    if keras.backend.backend() != "tensorflow" or WITH_DEFAULTS:
        yield contextlib.nullcontext
        return
    # Loaded models are compiled only if their class has this class's `compile`.
    trainer = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
    compile_model = trainer.compile
    makers = {
        name: getattr(keras.Model, name)
        for name in (
            "make_train_function",
            "make_test_function",
            "make_predict_function",
        )
    }
    by_default = weakref.WeakSet()

    def remember(model, *args, jit_compile="auto", **kwargs):
        (by_default.add if jit_compile == "auto" else by_default.discard)(model)
        return compile_model(model, *args, jit_compile=jit_compile, **kwargs)

    def make(model, force=False, *, name):
        optimizer = getattr(model, "optimizer", None)
        if model.built and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        chosen = model.run_eagerly
        model.run_eagerly = chosen or model in by_default
        try:
            return makers[name](model, force)
        finally:
            model.run_eagerly = chosen

    patch = pytest.MonkeyPatch()

    def set_up():
        patch.setattr(trainer, "compile", remember)
        for name in makers:
            patch.setattr(keras.Model, name, functools.partialmethod(make, name=name))

    @contextlib.contextmanager
    def as_users_do():
        patch.undo()
        yield
        set_up()

    set_up()
    yield as_users_do
    patch.undo()


@pytest.fixture
def names_of_the_package(monkeypatch):
    """Names of layers and maps that other tests register do not meet this test's."""
    from keras_efficient_attn.layers.attention import feature_maps, registry

    for module, attribute in ((registry, "_LAYERS"), (feature_maps, "_CLASSES")):
        own = {
            name: found
            for name, found in getattr(module, attribute).items()
            if found.__module__.startswith("keras_efficient_attn.")
        }
        monkeypatch.setattr(module, attribute, own)
