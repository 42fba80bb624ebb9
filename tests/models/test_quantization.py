"""Quantised models: all that Keras quantises is, and results stay near."""

from functools import partial

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientSeq2SeqLM,
    TransformerXL,
)
from tests.autodiff import to_numpy
from tests.models.cases import (
    CASES,
    PreviousToken,
    calibrate,
    inputs,
    make_backbone,
    make_task,
)

# What Keras quantises in KerasHub's own models.
QUANTIZABLE = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Embedding,
    keras.layers.ReversibleEmbedding,
)
XL_SHARED = dict(num_layers=2, attention="xl:biases=shared")


def result(model, data):
    output = model(data)
    if isinstance(output, dict):
        output = output["decoder_sequence_output"]
    return to_numpy(output)


def check_quantized(model, data, mode, tolerance, but=()):
    """Quantises; compares the layers with `QUANTIZABLE` and results with those before.

    Args:
        model, data: A backbone or task, and its inputs.
        mode: `"int8"`, `"int4"` or `"float8"`.
        tolerance: Largest error, relative to the largest entry.
        but: Classes of layers that stay.
    """
    before = result(model, data)
    model.quantize(mode)
    layers = model._flatten_layers()
    expected = {
        layer.path
        for layer in layers
        if isinstance(layer, QUANTIZABLE) and not isinstance(layer, but)
    }
    assert expected
    assert {x.path for x in layers if x.quantization_mode == mode} == expected
    error = np.abs(result(model, data) - before).max()
    assert 0 < error < tolerance * np.abs(before).max()


@pytest.mark.any_backend
@pytest.mark.parametrize("name", CASES)
def test_every_dense_layer_and_embedding_becomes_int8(name):
    # A user's subclass: Keras leaves it to the subclass.
    check_quantized(make_backbone(name), inputs(name), "int8", 0.03, PreviousToken)


@pytest.mark.parametrize(
    "mode, tolerance, but",
    [
        ("int8", 0.03, ()),
        ("int4", 0.3, ()),
        # Keras has no embeddings in float8.
        ("float8", 0.2, keras.layers.ReversibleEmbedding),
    ],
)
def test_modes(mode, tolerance, but):
    task = EfficientCausalLM(make_backbone("mixed-rotary"))
    check_quantized(task, inputs("mixed-rotary"), mode, tolerance, but)


@pytest.mark.any_backend
def test_an_encoder_with_a_decoder():
    task = EfficientSeq2SeqLM(make_backbone("encoder-decoder"))
    check_quantized(task, inputs("encoder-decoder"), "int8", 0.03)


def test_layers_that_share_biases():
    backbone = make_backbone("defaults", **XL_SHARED)
    check_quantized(backbone, inputs("defaults"), "int8", 0.03)


def causal_lm(name, **options):
    backbone = make_backbone(name, vocabulary_size=256, **options)
    return EfficientCausalLM(backbone), inputs(name)


def task(name):
    model, data, _ = make_task(name, vocabulary_size=256)
    return model, data


MODELS = {
    **{
        name: partial(causal_lm, name)
        for name in ("softmax", "reversible", "universal")
    },
    **{name: partial(task, name) for name in ("masked-lm", "classifier")},
    "transformer-xl": lambda: (
        TransformerXL(causal_lm("defaults", **XL_SHARED)[0], batch_size=2),
        None,
    ),
}


@pytest.mark.parametrize("mode", ["gptq", "awq"])
@pytest.mark.parametrize("name", MODELS)
def test_calibrated_modes(name, mode):
    if mode == "awq" and keras.backend.backend() == "tensorflow":
        pytest.skip("Keras' AWQ changes KerasHub's models there by half as well")
    model, data = MODELS[name]()
    before = None if data is None else result(model, data)
    calibrate(model, mode)
    stack = getattr(model, "language_model", model).backbone
    stack = stack.decoder or stack.encoder
    dense = [x for x in stack._flatten_layers() if isinstance(x, QUANTIZABLE[:2])]
    assert all(getattr(layer, f"is_{mode}_calibrated") for layer in dense) and dense
    if data is not None:
        error = np.abs(result(model, data) - before).max()
        assert 0 < error < 0.4 * np.abs(before).max()
