"""Classifier and masked language model; presets of all tasks and the backbone."""

import functools
import json
import math
import re
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn import SoftmaxAttention
from keras_efficient_attn.models import (
    EfficientByteTokenizer,
    EfficientCausalLM,
    EfficientCausalLMPreprocessor,
    EfficientMaskedLM,
    EfficientMaskedLMPreprocessor,
    EfficientTextClassifier,
    EfficientTextClassifierPreprocessor,
    EfficientTransformerBackbone,
    preset_names,
)
from keras_efficient_attn.models.files import FOLDER
from tests.autodiff import to_numpy
from tests.models.cases import CASES, inputs, make_backbone, randomize
from tests.saving import assert_same_model, saved_and_loaded

TEXTS = ["The quick brown fox", "def f(x): return x", "naïve"]


def make_task(kind):
    tokenizer = EfficientByteTokenizer()
    name = "mixed-rotary" if kind is EfficientCausalLM else "encoder"
    backbone = make_backbone(name, vocabulary_size=256, num_layers=1)
    if kind is EfficientCausalLM:
        preprocessor = EfficientCausalLMPreprocessor(tokenizer, sequence_length=20)
        return kind(backbone, preprocessor=preprocessor)
    if kind is EfficientTextClassifier:
        preprocessor = EfficientTextClassifierPreprocessor(
            tokenizer, sequence_length=20
        )
        return randomize(kind(backbone, 3, preprocessor=preprocessor, dropout=0.1))
    preprocessor = EfficientMaskedLMPreprocessor(
        tokenizer, sequence_length=20, mask_selection_length=4
    )
    return randomize(kind(backbone, preprocessor=preprocessor))


def task_inputs(kind):
    data = inputs("encoder", length=20)
    if kind is EfficientMaskedLM:
        data["mask_positions"] = np.array([[1, 4, 0, 0], [2, 3, 9, 0]], "int32")
    return data


KINDS = [EfficientCausalLM, EfficientTextClassifier, EfficientMaskedLM]


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_after_loading(kind, tmp_path):
    task, data = make_task(kind), task_inputs(kind)
    task.preprocessor = None
    options = {}
    if kind is EfficientCausalLM:
        options["sampler"] = keras_hub.samplers.TopPSampler(p=0.3)
    task.compile(keras.optimizers.AdamW(3e-3), **options)
    shape = to_numpy(task(data)).shape[:-1]
    task.train_on_batch(data, np.zeros(shape, "int32"))
    again = saved_and_loaded(task, tmp_path)
    assert isinstance(again.optimizer, keras.optimizers.AdamW)
    saved, loaded = task.optimizer.variables, again.optimizer.variables
    assert len(loaded) == len(saved) > 2 * len(task.trainable_variables)
    for one, other in zip(saved, loaded, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    if kind is EfficientCausalLM:
        assert again.sampler.p == 0.3
    again.train_on_batch(data, np.zeros(shape, "int32"))
    assert int(again.optimizer.iterations) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_comes_back_from_a_preset(kind, tmp_path):
    task, data = make_task(kind), task_inputs(kind)
    expected = to_numpy(task(data))
    task.save_to_preset(tmp_path)
    # KerasHub finds the class by the backbone's class; the weights are the task's.
    base = kind.__bases__[-1]
    assert base.__module__.startswith("keras_hub")
    for restored in (base.from_preset(str(tmp_path)), kind.from_preset(tmp_path)):
        assert type(restored) is kind
        assert type(restored.preprocessor) is kind.preprocessor_cls
        assert restored.preprocessor.sequence_length == 20
        np.testing.assert_allclose(
            to_numpy(restored(data)), expected, rtol=1e-5, atol=1e-6
        )
    random = kind.from_preset(tmp_path, load_weights=False)
    assert np.abs(to_numpy(random(data)) - expected).max() > 1e-3


def test_a_task_comes_back_from_a_file(tmp_path):
    task, data = make_task(EfficientTextClassifier), task_inputs(None)
    assert_same_model(saved_and_loaded(task, tmp_path), task, data)


@pytest.mark.any_backend
@pytest.mark.parametrize("name", CASES)
def test_a_backbone_comes_back_from_a_preset(name, tmp_path):
    backbone, data = make_backbone(name), inputs(name)
    backbone.save_to_preset(tmp_path)
    restored = keras_hub.models.Backbone.from_preset(str(tmp_path))
    assert type(restored) is EfficientTransformerBackbone
    assert restored.get_config() == backbone.get_config()
    for weight, other in zip(restored.weights, backbone.weights, strict=True):
        assert weight.path == other.path
        np.testing.assert_array_equal(to_numpy(weight), to_numpy(other))
    assert set(data) == {tensor.name for tensor in restored.inputs}


@pytest.mark.any_backend
def test_a_preset_takes_another_dtype(tmp_path):
    backbone = make_backbone("mixed-rotary")
    backbone.save_to_preset(tmp_path)
    half = EfficientTransformerBackbone.from_preset(tmp_path, dtype="bfloat16")
    assert {layer.compute_dtype for layer in half.transformer_layers} == {"bfloat16"}
    for weight, other in zip(half.weights, backbone.weights, strict=True):
        np.testing.assert_allclose(
            to_numpy(weight).astype("float32"), to_numpy(other), rtol=1e-2
        )


@pytest.mark.any_backend
def test_a_quantised_backbone_comes_back(tmp_path):
    backbone, data = make_backbone("mixed-rotary", num_layers=1), inputs("mixed-rotary")
    full = to_numpy(backbone(data))
    backbone.quantize("int8")
    expected = to_numpy(backbone(data))
    assert 0 < np.abs(expected - full).max() < 0.3 * np.abs(full).max()
    backbone.save_to_preset(tmp_path)
    for restored in (
        EfficientTransformerBackbone.from_preset(tmp_path),
        saved_and_loaded(backbone, tmp_path),
    ):
        np.testing.assert_allclose(
            to_numpy(restored(data)), expected, rtol=1e-4, atol=1e-5
        )


def test_lora_trains_queries_and_values_and_comes_back(tmp_path):
    backbone, data = make_backbone("mixed-rotary"), inputs("mixed-rotary")
    backbone.enable_lora(2)
    paths = {weight.path for weight in backbone.trainable_weights}
    assert all("/query/" in path or "/value/" in path for path in paths)
    assert sum("lora_kernel" in path for path in paths) == 8
    for weight in backbone.trainable_weights:
        weight.assign(np.full(weight.shape, 0.1))
    backbone.save_lora_weights(str(tmp_path / "weights.lora.h5"))
    other = make_backbone("mixed-rotary")
    before = to_numpy(other(data))
    other.load_lora_weights(str(tmp_path / "weights.lora.h5"))
    lora = [w for w in other.trainable_weights if "lora" in w.path]
    assert all((to_numpy(weight) == np.float32(0.1)).all() for weight in lora)
    assert np.abs(to_numpy(other(data)) - before).max() > 1e-3


# Shipped configurations.

# Parameters in millions, and the tolerance for the paper's rounding and, for the
# Transformer base, its vocabulary of "about 37,000".
PUBLISHED = {
    # Vaswani et al., table 3.
    "transformer_base": (6, 65, 2.5),
    # Dehghani et al. compare with it at an equal number of parameters.
    "universal_transformer_base": (1, 65, 2.5),
    "adaptive_universal_transformer_base": (1, 65, 2.5),
    # Al-Rfou et al., at inference, without the auxiliary heads.
    "transformer_enwik8_12l": (12, 41, 0.5),
    "transformer_enwik8_64l": (64, 219, 0.5),
    # Sukhbaatar et al.; they count 38 for bytes and 39 for fewer characters.
    "adaptive_span_enwik8_12l": (12, 38, 1.0),
    "adaptive_span_enwik8_24l": (24, 209, 0.5),
    # Child et al., table 1.
    "sparse_enwik8_30l": (30, 95, 0.5),
    "sparse_cifar10_128l": (128, 59, 0.5),
    # Dai et al., table 2.
    "transformer_xl_enwik8_12l": (12, 41, 0.5),
    "transformer_xl_enwik8_24l": (24, 277, 0.5),
    # Sun et al., table 2.
    "retnet_1.3b": (24, 1300, 15),
    # The sizes that the papers are named by, with 32,000 tokens.
    "gla_340m": (24, 340, 5),
    "delta_net_340m": (24, 340, 5),
    "gated_delta_net_1.3b": (21, 1300, 25),
    # The sum of the shapes in the authors' code, which has 24 biases of 2,048 more.
    "kimi_delta_1.4b": (24, 1390.94, 0.06),
    # Lingle's code, 48 units; his paper has 190, with the codes.
    "transformer_vq_enwik8_24l": (48, 184.5, 0.1),
}


@pytest.fixture
def weights_are_zeros(monkeypatch):
    """For full-size models whose weights do not matter: drawing takes seconds."""
    for initializer in ("VarianceScaling", "RandomNormal", "RandomUniform"):
        monkeypatch.setattr(
            getattr(keras.initializers, initializer),
            "__call__",
            lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype),
        )


@functools.cache
def parameters(name, layers):
    """Parameters of a configuration that are trained, by those of few layers."""
    config = json.loads((FOLDER / name / "config.json").read_text())["config"]
    attention = config["attention"]
    # A list of attentions is repeated over the layers.
    period = len(attention) if isinstance(attention, list) else 1
    period = period if layers % period == 0 else 1
    one, two = (
        sum(
            math.prod(weight.shape)
            for weight in EfficientTransformerBackbone.from_preset(
                name, load_weights=False, num_layers=count
            ).trainable_weights
        )
        for count in (period, 2 * period)
    )
    return one + (two - one) * (layers // period - 1)


def documented_names():
    """`(name, millions)` of the rows of the page on configurations."""
    page = Path(__file__).resolve().parents[3] / "docs" / "presets.md"
    return re.findall(r"^\| `(\S+)` \| ([\d.]+) \|", page.read_text(), re.M)


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
@pytest.mark.parametrize(("name", "millions"), documented_names())
def test_parameters_are_those_of_the_page(name, millions):
    config = json.loads((FOLDER / name / "config.json").read_text())["config"]
    assert f"{parameters(name, config['num_layers']) / 1e6:.1f}" == millions


@pytest.mark.any_backend
def test_the_page_has_all_configurations():
    assert sorted(name for name, _ in documented_names()) == list(preset_names())


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_paper_counts(name):
    layers, millions, tolerance = PUBLISHED[name]
    assert abs(parameters(name, layers) / 1e6 - millions) < tolerance


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
def test_gtrxl_has_gates_and_a_norm_at_its_end():
    backbone = EfficientTransformerBackbone.from_preset(
        "gtrxl_12l", load_weights=False, num_layers=1
    )
    block = backbone.transformer_layers[0]
    assert block.residual == "gated"
    assert block.feed_forward.activation is keras.activations.relu
    assert block.attention.memory_length == 512
    assert backbone.decoder.final_norm is not None


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
def test_the_performer_has_the_layers_of_the_paper():
    backbone = EfficientTransformerBackbone.from_preset(
        "performer_6l", load_weights=False, num_layers=1
    )
    block = backbone.transformer_layers[0]
    shapes = {tuple(weight.shape) for weight in block.trainable_weights}
    assert {(512, 8, 64), (8, 64, 512), (512, 2048), (2048, 512)} <= shapes
    # The default number of features of "favor+": 64 · ln 64, rounded up.
    assert block.attention.feature_dim == 267


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
def test_every_shipped_configuration_makes_a_model():
    assert set(PUBLISHED) < set(preset_names())
    for name in preset_names():
        backbone = EfficientTransformerBackbone.from_preset(
            name, load_weights=False, num_layers=1, vocabulary_size=10
        )
        for output in keras.tree.flatten(backbone.output):
            assert output.shape == (None, None, backbone.hidden_dim)


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
@pytest.mark.parametrize("layers", [12, 24])
def test_adaptive_spans_leave_out_the_own_position(layers):
    """As in the paper, whose sum over past positions ends before the query's."""
    backbone = EfficientTransformerBackbone.from_preset(
        f"adaptive_span_enwik8_{layers}l", load_weights=False, num_layers=1
    )
    assert backbone.transformer_layers[0].attention.include_self is False


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
def test_the_reformer_is_that_of_the_authors_configuration():
    """trax's `reformer_enwik8.gin`: one hashed layer in four, dropout 0.2."""
    backbone = EfficientTransformerBackbone.from_preset(
        "reformer_enwik8_12l", load_weights=False, num_layers=4
    )
    blocks = backbone.transformer_layers
    attentions = [block.attention for block in blocks]
    kinds = [type(attention).__name__ for attention in attentions]
    local = "LocalAttention"
    assert kinds == [local, local, "ReformerLSHAttention", local]
    assert (attentions[0].query_block, attentions[0].memory) == (128, 128)
    assert (attentions[2].bucket_size, attentions[2].num_hashes) == (256, 2)
    for block in blocks:
        assert block.dropout == block.attention.get_config()["dropout"] == 0.2
        chunked = block.feed_forward
        assert (chunked.chunk_size, chunked.feed_forward.dropout.rate) == (4096, 0.2)
    backbone = EfficientTransformerBackbone.from_preset(
        "reformer_wmt_base", load_weights=False, num_layers=1
    )
    for block in backbone.transformer_layers:
        assert block.dropout == block.feed_forward.dropout.rate == 0.1
        for attention in (block.attention, block.cross_attention):
            assert attention is None or attention.get_config()["dropout"] == 0.1


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
def test_the_vq_configuration_has_the_codes_of_the_paper():
    """48 codebooks of 512 codes of width 128: 3.1 million, beside the parameters."""
    backbone = EfficientTransformerBackbone.from_preset(
        "transformer_vq_enwik8_24l", load_weights=False, num_layers=2
    )
    codes = [
        math.prod(block.attention.codebook.shape)
        for block in backbone.transformer_layers
    ]
    folder = FOLDER / "transformer_vq_enwik8_24l"
    config = json.loads((folder / "config.json").read_text())["config"]
    assert codes == [512 * 128] * 2
    assert config["num_layers"] * codes[0] == 3_145_728


@pytest.mark.any_backend
@pytest.mark.usefixtures("weights_are_zeros")
def test_a_shipped_configuration_makes_a_task():
    task = EfficientCausalLM.from_preset(
        "transformer_enwik8_12l", load_weights=False, num_layers=1
    )
    assert type(task.preprocessor) is EfficientCausalLMPreprocessor
    assert type(task.backbone.transformer_layers[0].attention) is SoftmaxAttention
    with pytest.raises(ValueError, match="load_weights=False"):
        EfficientCausalLM.from_preset("performer_6l")


# Tasks.


def test_a_classifier_averages_over_real_positions():
    model, data = make_task(EfficientTextClassifier), task_inputs(None)
    hidden = to_numpy(model.backbone(data))
    dense = model.get_layer("logits")
    kernel, bias = to_numpy(dense.kernel), to_numpy(dense.bias)
    for row, mask in enumerate(data["padding_mask"]):
        mean = hidden[row, mask == 1].mean(0)
        np.testing.assert_allclose(
            to_numpy(model(data))[row], mean @ kernel + bias, rtol=1e-3, atol=1e-4
        )


def test_a_masked_lm_masks_bytes_and_learns():
    model = make_task(EfficientMaskedLM)
    x, y, weights = model.preprocessor(TEXTS)
    assert set(x) == {"token_ids", "padding_mask", "mask_positions"}
    x = {name: to_numpy(value) for name, value in x.items()}
    y, weights = to_numpy(y), to_numpy(weights)
    for row, text in enumerate(TEXTS):
        original = [253, *text.encode()][:19] + [254]
        for position, token, weight in zip(
            x["mask_positions"][row], y[row], weights[row], strict=True
        ):
            if weight:
                assert original[position] == token
                assert 0 < position < len(original) - 1
    model.compile(keras.optimizers.Adam(0.03), loss="auto", weighted_metrics=[])
    model.preprocessor = None
    history = model.fit(x, y, sample_weight=weights, epochs=20, verbose=0).history
    assert history["loss"][-1] < 0.7 * history["loss"][0]


@pytest.mark.any_backend
def test_tasks_refuse_other_architectures():
    with pytest.raises(ValueError, match="encoder_decoder"):
        EfficientTextClassifier(make_backbone("encoder-decoder"), 2)
    with pytest.raises(ValueError, match="architecture='encoder'"):
        EfficientMaskedLM(make_backbone("defaults"))


@pytest.mark.any_backend
def test_a_masked_lm_refuses_outputs_wider_than_the_embedding():
    backbone = EfficientTransformerBackbone(
        32,
        1,
        1,
        8,
        8,
        architecture="encoder",
        attention="softmax",
        residual={"kind": "reversible", "streams": "concatenated"},
        embedding="untied",
    )
    with pytest.raises(ValueError, match="streams='mean'.*width 16, hidden_dim=8"):
        EfficientMaskedLM(backbone)


@pytest.mark.any_backend
def test_keras_nlp_is_the_same_library():
    keras_nlp = pytest.importorskip("keras_nlp")
    assert issubclass(EfficientTransformerBackbone, keras_nlp.models.Backbone)
    assert issubclass(EfficientCausalLM, keras_nlp.models.CausalLM)
