"""Imports and exports of the package."""

import importlib
import pkgutil
import subprocess
import sys

import keras
import pytest

import keras_efficient_attn
from keras_efficient_attn import layers
from tests import readme

BACKENDS = {"tensorflow", "jax", "torch"}
# The base of all attention layers is exported, but never in saved files.
EXPORTED = {
    name
    for name in keras_efficient_attn.__all__
    if issubclass(getattr(keras_efficient_attn, name), keras.layers.Layer)
} - {"EfficientAttention"}
# Registered, but only made by other layers.
PARTS = {"Halting", "_ReportingCell"}


def test_import_loads_neither_extras_nor_other_backends(backend):
    # Keras itself may import other backends (for its exporters): what counts is what
    # this package adds.
    code = (
        "import sys, keras; before = set(sys.modules);"
        "import keras_efficient_attn;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}));"
        # The rest is loaded on first use.
        "keras_efficient_attn.models.TransformerBlock;"
        "keras_efficient_attn.benchmark.compare"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    added = set(done.stdout.split())
    assert "keras_efficient_attn" in added
    unwanted = {"keras_hub", "keras_nlp", "matplotlib", *BACKENDS}
    assert not added & unwanted


def test_a_star_replaces_no_name_of_keras():
    names = {"keras_efficient_attn": keras, "keras_efficient_attn.layers": keras.layers}
    for package, other in names.items():
        scope = {}
        exec(f"from {package} import *", scope)
        taken = set(dir(keras)) | set(dir(other))
        assert not {n for n in scope if not n.startswith("_")} & taken


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_exported_layers_are_those_of_the_layers_and_registered(name):
    layer = getattr(keras_efficient_attn, name)
    assert getattr(layers, name) is layer and name in layers.__all__
    registered = keras.saving.get_registered_name(layer)
    assert registered == f"keras_efficient_attn>{name}"


def test_every_layer_is_exported():
    for module in pkgutil.walk_packages(layers.__path__, f"{layers.__name__}."):
        importlib.import_module(module.name)
    registered = {
        found.__name__
        for found in keras.saving.get_custom_objects().values()
        if found.__module__.startswith(f"{layers.__name__}.")
        and issubclass(found, keras.layers.Layer)
        and not issubclass(found, layers.FeatureMap)
    }
    assert registered - PARTS == EXPORTED


def test_the_examples_of_the_readme_run(short_training_is_not_traced):
    with short_training_is_not_traced():
        drop_in, language_model, swapped = readme.run_examples()
        generated = language_model["model"].generate("def ", max_length=100)
    assert drop_in["model"].output_shape == (None, None, 256)
    assert generated.startswith("def ") and len(generated) > len("def ")
    swap_report = swapped["models"].swap_report
    report = swap_report(*(swapped[n] for n in ("trained", "efficient", "batch")))
    assert [layer.replaced for layer in report.layers] == [True, True]
    assert 0 < report.layers[-1].residual < 0.5
