"""Programs in SavedModel, onnxruntime and LiteRT; docs/export.md has the table."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import tree

import keras_efficient_attn
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.layers.attention.linear.gated.layer import (
    GatedStateAttention,
)
from keras_efficient_attn.models import EfficientTransformerBackbone
from tests.autodiff import to_numpy
from tests.export.programs import (
    FORMATS,
    NOT_EXPORTED,
    Step,
    run_exported,
)
from tests.registered import own_attention_names

ROOT = Path(keras_efficient_attn.__file__).parents[1]
NAMES = own_attention_names()
if keras.backend.backend() != "tensorflow":
    FORMATS = FORMATS[:1]


def whole_sequence(length, name, **options):
    """A model of a causal layer, and an input of it."""
    sequence = keras.Input((length, 16), batch_size=2)
    layer = get_attention(name, num_heads=2, key_dim=8, **options)
    model = keras.Model([sequence], layer(sequence, sequence, use_causal_mask=True))
    x = np.random.default_rng(0).normal(size=(2, length, 16)).astype("float32")
    return model, x


def check(model, inputs, format, folder):
    expected = tree.flatten(model(inputs))
    received = run_exported(model, inputs, format, folder)
    for output, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(output, to_numpy(other), rtol=1e-5, atol=1e-5)


@pytest.mark.export
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_sequence(name, format, tmp_path):
    model, x = whole_sequence(24, name)
    if format in NOT_EXPORTED.get(name, ()):
        # Each runtime rejects such a program with its own error.
        with pytest.raises(Exception, match="MatrixTriangularSolve|Select"):
            check(model, [x], format, tmp_path)
    else:
        check(model, [x], format, tmp_path)


@pytest.mark.export
@pytest.mark.parametrize("name", [name for name in NAMES if name != "reformer"])
def test_two_free_lengths_on_jax(name, backend):
    if backend != "jax":
        pytest.skip("the others have no symbolic lengths")
    import jax

    layer = get_attention(name, num_heads=2, key_dim=8)
    layer.build((None, None, 16), (None, None, 16))
    causal = isinstance(layer, GatedStateAttention)

    def call(query, key):
        return layer(query, key, use_causal_mask=causal)

    scope = jax.export.SymbolicScope()
    shapes = (
        jax.export.symbolic_shape(shape, scope=scope)
        for shape in ("batch, queries, 16", "batch, keys, 16")
    )
    specs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    exported = jax.export.export(jax.jit(call))(*specs)
    for lengths in ((5, 9), (9, 5)):
        arrays = [np.random.default_rng(0).normal(size=(2, n, 16)) for n in lengths]
        query, key = (x.astype("float32") for x in arrays)
        received, expected = exported.call(query, key), call(query, key)
        np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.export
@pytest.mark.parametrize("format", FORMATS)
def test_sorted_chunks(format, tmp_path):
    model, x = whole_sequence(96, "reformer", bucket_size=4, num_hashes=1)
    if format == "LiteRT":
        with pytest.raises(RuntimeError, match="Select TensorFlow op"):
            check(model, [x], format, tmp_path)
    else:
        check(model, [x], format, tmp_path)


@pytest.mark.export
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_a_causal_model(name, format, tmp_path):
    backbone = EfficientTransformerBackbone(
        50, 2, 2, 16, 32, attention=name, feed_forward={"activation": "relu"}
    )
    step = Step(backbone, max_length=16)
    leaves = [to_numpy(leaf) for leaf in tree.flatten(step.initial_state)]
    inputs = [np.array([[3]], "int32"), *leaves]
    check(step, inputs, format, tmp_path)


@pytest.mark.export
def test_the_page_serves_what_the_model_generates(tmp_path, monkeypatch, backend):
    if backend == "torch":
        pytest.skip("Keras exports no SavedModel of PyTorch")
    monkeypatch.chdir(tmp_path)
    scope = {}
    page = (ROOT / "docs" / "export.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "export.md", "exec"), scope)
    backbone, text = scope["backbone"], list(b"def ")
    while len(text) < len(scope["text"]):
        tokens = np.array([text], "int32")
        hidden = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
        logits = to_numpy(backbone.token_embedding(hidden, reverse=True))
        text.append(int(logits[0, -1].argmax()))
    assert len(text) == 4 + 21 and scope["text"] == text


@pytest.mark.any_backend
def test_the_page_has_the_table_and_the_versions():
    page = (ROOT / "docs" / "export.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page, re.M)
    assert [name for name, _ in rows] == NAMES
    for name, cells in rows:
        *sequences, token = (cell.strip() for cell in cells.split("|"))
        missing = NOT_EXPORTED.get(name, {})
        formats = ("SavedModel", "ONNX", "LiteRT")
        assert sequences == [
            f"no: {missing[format]}" if format in missing else "yes"
            for format in formats
        ]
        assert token == "yes"
    constraints = (ROOT / "constraints.txt").read_text()
    for package, version in re.findall(r"([\w-]+) (\d+\.\d+\.\d+)", page):
        assert f"{package}=={version}\n" in constraints, package
