"""What importing the package does and offers."""

import subprocess
import sys
from pathlib import Path

import keras
import pytest

import keras_efficient_attn
from keras_efficient_attn import layers

BACKENDS = {"tensorflow", "jax", "torch"}
LAYERS = [
    "AdaptiveComputationTime",
    "AdaptiveRNN",
    "AdaptiveSpan",
    "ChunkedFeedForward",
    "ChunkedVocabularyLoss",
    "FourierAttention",
    "GatedResidual",
    "LinearAttention",
    "LocalAttention",
    "PerformerAttention",
    "PositionBiases",
    "ReformerLSHAttention",
    "RelativePositionXL",
    "ReversibleBlock",
    "ReversibleStack",
    "SoftmaxAttention",
    "SparseAttention",
    "VQAttention",
]


def test_import_loads_neither_extras_nor_other_backends(backend):
    # Keras itself may import other backends (for its exporters): what counts is what
    # this package adds.
    code = (
        "import sys, keras; before = set(sys.modules);"
        "import keras_efficient_attn;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}));"
        # The rest loads when first used.
        "keras_efficient_attn.models.TransformerBlock;"
        "keras_efficient_attn.benchmark.compare"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    added = set(done.stdout.split())
    assert "keras_efficient_attn" in added
    unwanted = {"keras_hub", "keras_nlp", "matplotlib", *BACKENDS}
    assert not added & unwanted


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_registered_and_exported(name):
    layer = getattr(layers, name)
    assert getattr(keras_efficient_attn, name) is layer
    registered = keras.saving.get_registered_name(layer)
    assert registered == f"keras_efficient_attn>{name}"


def test_the_examples_of_the_readme_run(
    monkeypatch, optimizers_are_built_before_steps_are_traced
):
    monkeypatch.setattr(
        keras.Model,
        "make_train_function",
        optimizers_are_built_before_steps_are_traced,
    )
    readme = Path(__file__).resolve().parent.parent / "README.md"
    drop_in, language_model, swapped = (
        run_code(part.split("```")[0])
        for part in readme.read_text().split("```python\n")[1:]
    )
    assert drop_in["model"].output_shape == (None, None, 256)
    generated = language_model["model"].generate("def ", max_length=100)
    assert generated.startswith("def ") and len(generated) > len("def ")
    report = swapped["swap_report"](
        *(swapped[n] for n in ("trained", "efficient", "batch"))
    )
    assert [layer.replaced for layer in report.layers] == [True, True]
    assert 0 < report.layers[-1].residual < 0.5


def run_code(code):
    scope = {}
    exec(code, scope)
    return scope
