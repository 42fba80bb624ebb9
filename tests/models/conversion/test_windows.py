"""A window for each layer, within a mean."""

import itertools

import keras
import numpy as np
import pytest

from keras_efficient_attn.models import convert_backbone, swap_report
from keras_efficient_attn.models.conversion.sites import find_sites
from keras_efficient_attn.models.conversion.window_search import least_error
from tests.models.conversion import families


def best_by_trying_all(errors, total):
    """The least sum of errors, and its windows."""
    return min(
        (sum(of[w] for of, w in zip(errors, windows, strict=True)), windows)
        for windows in itertools.product(*errors)
        if sum(windows) <= total
    )


@pytest.mark.any_backend
def test_the_least_error_of_all_choices():
    random = np.random.default_rng(0)
    for total in (4, 9, 20, 32, 50):
        # Not all errors decrease with the window.
        errors = [{w: random.uniform() / w for w in (1, 2, 4, 8)} for _ in range(4)]
        least, windows = best_by_trying_all(errors, total)
        assert least_error(errors, total) == list(windows), (total, least)
    # A layer that a larger window does not improve does not get one.
    assert least_error([{1: 0.5, 2: 0.5}, {1: 1.0, 2: 0.9}], 8) == [1, 2]
    with pytest.raises(ValueError, match="no numbers"):
        least_error([{1: np.inf, 2: np.inf}], 8)


@pytest.mark.any_backend
def test_the_layer_that_attends_far_gets_the_window():
    backbone = families.make("distil_bert")
    (near, far) = (site.layer for site in find_sites(backbone))
    # The first layer reads orthogonal vectors, and each position attends to itself.
    rows = np.ones((1, 1))
    for _ in range(4):
        rows = np.block([[rows, rows], [rows, -rows]])
    embedding, norm = backbone.embeddings, backbone.embeddings_layer_norm
    tokens, positions = embedding.token_embedding, embedding.position_embedding
    tokens.embeddings.assign(np.zeros((50, 16)))
    positions.position_embeddings.assign(np.roll(rows, -1, axis=0))
    norm.gamma.assign(np.ones(16))
    norm.beta.assign(np.zeros(16))
    for dense in (near._query_dense, near._key_dense):
        dense.kernel.assign(5 * np.eye(16).reshape(16, 2, 8))
        dense.bias.assign(np.zeros((2, 8)))
    # In the second, each attends to all equally.
    far._query_dense.kernel.assign(np.zeros((16, 2, 8)))
    far._query_dense.bias.assign(np.zeros((2, 8)))

    data = families.inputs(backbone)
    efficient = convert_backbone(
        backbone, "local:window=3", calibrate=data, window_budget=4.5
    )
    assert efficient.attention == ["local:window=1", "local:window=8"]
    # 8 is the whole text.
    families.assert_same_outputs(backbone, efficient, data)
    narrow = convert_backbone(backbone, "local:window=4")
    with pytest.raises(AssertionError):
        families.assert_same_outputs(backbone, narrow, data, 1e-3)


@pytest.mark.any_backend
def test_the_errors_are_those_of_the_layers_alone():
    backbone = families.make("gpt2")
    data = families.inputs(backbone)
    errors = [{}, {}]
    for window in (1, 2, 4):
        converted = convert_backbone(backbone, f"local:window={window}")
        report = swap_report(backbone, converted, data)
        for by_window, layer in zip(errors, report.layers, strict=True):
            by_window[window] = layer.attention**2
    for budget in (1, 2, 2.5, 3.9):
        efficient = convert_backbone(
            backbone, "local", calibrate=data, window_budget=budget
        )
        _, windows = best_by_trying_all(errors, 2 * budget)
        assert efficient.attention == [f"local:window={w}" for w in windows]


@pytest.mark.parametrize(
    "name, attention, layers",
    [
        ("distil_bert", "vq:window=3,num_codes=3", None),
        # It is fitted to the keys beyond the window.
        ("gpt2", "performer:feature_map=power,rank=4,calibrated=True", [1]),
    ],
)
def test_the_same_as_with_these_windows_by_name(tmp_path, name, attention, layers):
    backbone = families.make(name)
    data = families.inputs(backbone)
    efficient = convert_backbone(
        backbone, attention, layers, calibrate=data, window_budget=3
    )
    config = efficient.get_config()
    names = config["attention"]
    assert len(names) == (2 if layers is None else 1)
    assert config["attention_layers"] == layers
    again = convert_backbone(backbone, names, layers, calibrate=data)
    for first, second in zip(efficient.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)
    families.assert_same_outputs(again, efficient, data)

    file = tmp_path / "model.keras"
    efficient.save(file)
    efficient.save_to_preset(tmp_path / "preset")
    for loaded in (
        keras.saving.load_model(file),
        type(efficient).from_preset(str(tmp_path / "preset")),
    ):
        assert loaded.get_config()["attention"] == names
        families.assert_same_outputs(efficient, loaded, data, 1e-6)


@pytest.mark.any_backend
def test_refusals():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    for attention, options, message in (
        ("local", dict(window_budget=4), "calibrate=None"),
        ("local", dict(window_budget=0.5, calibrate=data), "window_budget=0.5"),
        ("local", dict(window_budget=True, calibrate=data), "window_budget=True"),
        (
            "local",
            dict(window_budget=4, calibrate=data, layers="auto", budget=0.1),
            "layers='auto'",
        ),
        ("fourier", dict(window_budget=4, calibrate=data), "FourierAttention has none"),
        (
            "performer:feature_map=relu",
            dict(window_budget=4, calibrate=data),
            "`window` joins exact weights",
        ),
        (
            "performer:calibrated=True",
            dict(window_budget=100, calibrate=data),
            "sees a key beyond the window.*window=16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            convert_backbone(backbone, attention, **options)
