"""A layer from outside the package has all features of the package's layers."""

import inspect

import keras_hub
import numpy as np
import pytest

from keras_efficient_attn.benchmark import cli
from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    convert_backbone,
)
from tests.autodiff import to_numpy
from tests.contract.cases import CASES
from tests.models.tasks.test_causal_lm import generate, greedy, prompts
from tests.outside import SquareAttention


@pytest.mark.any_backend
def test_it_is_short_and_under_the_contract():
    assert len(inspect.getsource(SquareAttention).splitlines()) <= 60
    assert SquareAttention in {case.layer for case in CASES}


def test_it_stands_in_a_backbone_and_streams_in_generate():
    backbone = EfficientTransformerBackbone(
        50, 2, 2, 16, 24, attention="square:scale=2.0", embedding="untied"
    )
    assert backbone.transformer_layers[0].attention.scale == 2.0
    model, data = EfficientCausalLM(backbone), prompts((5, 3))
    model.compile(sampler="greedy")
    np.testing.assert_array_equal(
        generate(model, data)["token_ids"], greedy(model, data)
    )


@pytest.mark.any_backend
def test_it_has_a_row_with_operations_in_the_benchmark(capsys):
    arguments = ["--import", "tests.outside", "--layers", "square", "--lengths", "32"]
    arguments += ["--heads", "2", "--head-dim", "4", "--repeats", "1"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    # "of peak" is in the row if the layer counts its operations.
    row = next(line for line in lines if line.startswith("square"))
    assert "%" in row, row


def test_it_replaces_attention_in_a_trained_backbone():
    original = keras_hub.models.BertBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        max_sequence_length=16,
    )
    converted = convert_backbone(original, "square")
    ids = np.random.default_rng(0).integers(1, 50, (2, 7))
    inputs = {
        "token_ids": ids,
        "segment_ids": ids * 0,
        "padding_mask": ids * 0 + 1,
    }
    output = to_numpy(converted(inputs)["sequence_output"])
    assert np.isfinite(output).all()
    # Their weights are equal, but their attention differs.
    expected = to_numpy(original(inputs)["sequence_output"])
    assert 1e-4 < np.abs(output - expected).max()
