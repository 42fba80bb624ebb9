"""The reported errors, compared with errors of public outputs."""

import warnings

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import (
    convert_backbone,
    replace_attention,
    swap_report,
)
from tests.models.conversion import families

INEXACT = "local:window=2"


def test_errors_of_each_layer():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    kept = data["padding_mask"] > 0
    second = convert_backbone(backbone, INEXACT, layers=[1])
    first, last = swap_report(backbone, second, data).layers
    assert (first.replaced, first.attention, first.residual) == (False, 0.0, 0.0)
    assert (last.index, last.replaced) == (1, True)
    expected = families.output_error(second, backbone, data)
    assert last.residual == pytest.approx(expected, rel=1e-4)

    # The first layer's own error, from its inputs: the embeddings.
    both = convert_backbone(backbone, INEXACT)
    first, again = swap_report(backbone, both, data).layers
    x = backbone.embeddings(ops.convert_to_tensor(data["token_ids"]))
    x = backbone.embeddings_layer_norm(x)
    mask = ops.convert_to_tensor(data["padding_mask"])[:, None]
    old, new = (
        ops.convert_to_numpy(
            model.transformer_layers[0]._self_attention_layer(x, x, attention_mask=mask)
        )[kept]
        for model in (backbone, both)
    )
    assert first.attention == pytest.approx(families.relative_error(new, old), rel=1e-4)
    # The attention's error excludes the effect of earlier layers.
    assert again.attention == pytest.approx(last.attention, rel=1e-4)
    assert again.residual > last.residual

    lines = str(swap_report(backbone, second, data)).splitlines()
    assert lines[0].split() == ["layer", "attention", "residual"]
    assert lines[1].split()[1:] == [first.path, "softmax", "0.00%"]
    assert lines[2].split()[2:] == [f"{last.attention:.2%}", f"{last.residual:.2%}"]
    # Recording leaves no trace in the model.
    assert all("call" not in vars(layer) for layer in backbone._flatten_layers())


@pytest.mark.any_backend
def test_a_family_with_other_call_arguments():
    backbone = families.make("gemma", num_layers=1)
    data = families.inputs(backbone)
    efficient = convert_backbone(backbone, INEXACT)
    (layer,) = swap_report(backbone, efficient, data).layers
    (old,), (new,) = families.outputs(backbone, data), families.outputs(efficient, data)
    assert layer.attention > 0.01 and layer.residual > 0.01
    assert np.max(abs(new - old)) > 0.01


class OneOfTwo(keras.Model):
    def __init__(self):
        super().__init__()
        self.used = keras.layers.MultiHeadAttention(2, 4)
        self.idle = keras.layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.used.build(shape, shape)
        self.idle.build(shape, shape)

    def call(self, inputs):
        return self.used(inputs, inputs)


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:one_of_two")
def test_a_layer_that_is_not_called_has_no_error():
    data = np.random.default_rng(0).normal(size=(1, 8, 6)).astype("float32")
    original, replaced = OneOfTwo(), OneOfTwo()
    original(data), replaced(data)
    replaced.set_weights(original.get_weights())
    replace_attention(replaced, INEXACT)
    report = swap_report(original, replaced, data)
    used, idle = report.layers
    assert used.attention > 0.01
    assert (idle.replaced, idle.attention, idle.residual) == (True, None, None)
    assert str(report).splitlines()[2].split()[2:] == ["-", "-"]


@pytest.mark.any_backend
def test_models_of_different_depth_are_refused():
    backbone = families.make("distil_bert")
    other = families.make("distil_bert", num_layers=1)
    with pytest.raises(ValueError, match="2 and 1"):
        swap_report(backbone, other, families.inputs(backbone))


def cosine(first, second):
    return np.sum(first * second) / np.linalg.norm(first) / np.linalg.norm(second)


@pytest.mark.any_backend
def test_each_path_alone_is_what_a_model_with_it_alone_gives():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    both = "performer:feature_map=taylor,window=2"
    converted = convert_backbone(backbone, both)
    report = swap_report(backbone, converted, data)
    kept = data["padding_mask"] > 0
    models = {
        "as it is": converted,
        "window only": convert_backbone(backbone, "local:window=2"),
        "linear path only": convert_backbone(backbone, both.split(",")[0]),
    }
    assert [error.path for error in report.paths] == list(models)
    for error, model in zip(report.paths, models.values(), strict=True):
        old, new = (
            [row[mask].mean(0) for row, mask in zip(output, kept, strict=True)]
            for output in (ops.convert_to_numpy(m(data)) for m in (backbone, model))
        )
        expected = np.mean(list(map(cosine, old, new)))
        assert error.cosine == pytest.approx(expected, abs=1e-5)
        assert error.divergence is None and error.agreement is None
    assert len({round(error.cosine, 4) for error in report.paths}) == 3
    lines = str(report).splitlines()
    assert lines[-4].split()[:2] == ["output", "cosine"]
    assert lines[-1].startswith("linear path only")
    # A layer without a second path has no further rows.
    (only,) = swap_report(backbone, models["window only"], data).paths
    assert only.cosine == report.paths[1].cosine


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "options",
    [
        "performer:num_features=4,qk_norm=True",
        "performer:num_features=4,temperature=2.0",
        "performer:num_features=4,rotary_wavelength=100",
        "vq:num_codes=2,qk_norm=True,rotary_wavelength=100",
    ],
)
def test_the_window_alone_reads_the_queries_and_keys_of_the_layer(options):
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    # As long as the texts, the window is all there is.
    with warnings.catch_warnings(action="ignore"):
        converted = convert_backbone(backbone, f"{options},window=16")
    whole, window, _ = swap_report(backbone, converted, data).paths
    assert whole.cosine < 0.999
    assert window.cosine == pytest.approx(whole.cosine, abs=1e-6)


@pytest.mark.any_backend
def test_logits_of_tasks():
    backbone = families.make("gpt2")
    data = families.inputs(backbone)
    tasks = [
        keras_hub.models.GPT2CausalLM(model, preprocessor=None)
        for model in (backbone, convert_backbone(backbone, INEXACT))
    ]
    (error,) = swap_report(*tasks, data).paths
    kept = data["padding_mask"] > 0
    old, new = (
        ops.convert_to_numpy(ops.log_softmax(task(data)))[kept].astype("float64")
        for task in tasks
    )
    divergence = np.mean(np.sum(np.exp(old) * (old - new), axis=-1))
    assert error.divergence == pytest.approx(divergence, rel=1e-3)
    same = [np.argmax(a) == np.argmax(b) for a, b in zip(old, new, strict=True)]
    assert error.agreement == pytest.approx(np.mean(same))
    assert error.cosine is None
