"""Conversion: unchanged parts, changed parts and errors."""

import gc
import json
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LocalAttention, PerformerAttention, VQAttention
from keras_efficient_attn.models import (
    convert_backbone,
    efficient_backbone,
    replace_attention,
    swap_report,
)
from keras_efficient_attn.models.conversion import targets
from keras_efficient_attn.models.conversion.sites import find_sites
from tests.models.conversion import families
from tests.saving import saved_and_loaded

INEXACT = "performer:num_features=4"


def paths(model):
    return [weight.path for weight in model.weights]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_exact_attention_leaves_every_family_as_it_is(name):
    backbone_class, _, exact = families.FAMILIES[name]
    backbone = families.make(name)
    weights = backbone.get_weights()
    data = families.inputs(backbone)
    for part in data if isinstance(data, dict) else ():
        if "padding_mask" in part:
            # The second row starts with padding.
            data[part][1, :2] = 0
    before = families.outputs(backbone, data)
    efficient = convert_backbone(backbone, exact)
    families.assert_same_outputs(backbone, efficient, data)

    # The stock and the generated class, with the same weights in the same order.
    assert isinstance(efficient, backbone_class)
    assert type(efficient) is efficient_backbone(backbone_class)
    kept = [w for w in efficient.weights if "/efficient_attention/" not in w.path]
    if name in ("mixtral", "siglip_vision", "dinov2", "t5"):
        # Keras numbers unnamed layers across all models.
        assert [w.shape for w in kept] == [w.shape for w in backbone.weights]
    else:
        assert [w.path for w in kept] == paths(backbone)
    # Encoder-decoders have two per layer.
    both = name in ("bart", "whisper", "t5")
    assert len(families.efficient_layers(efficient)) == (4 if both else 2)

    # Changes of the copy do not affect the original.
    assert not families.efficient_layers(backbone)
    for weight in efficient.weights:
        weight.assign(np.zeros(weight.shape))
    for now, then in zip(backbone.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    for now, then in zip(families.outputs(backbone, data), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "qwen3",
        "phi3",
        "mixtral",
        "whisper",
        "siglip_vision",
        "clip",
        "dinov2",
        "t5",
        "gemma",
    ],
)
def test_a_family_trains_saves_and_is_reported(name, tmp_path):
    backbone = families.make(name)
    data = families.inputs(backbone)
    efficient = convert_backbone(backbone, "local:window=2")
    report = swap_report(backbone, efficient, data)
    assert all(layer.replaced and layer.attention > 1e-3 for layer in report.layers)
    targets = keras.tree.map_structure(ops.convert_to_numpy, backbone(data))
    model = keras.Model(efficient.input, efficient.output)
    model.compile("adam", keras.tree.map_structure(lambda _: "mse", targets))
    first, *_, last = model.fit(data, targets, epochs=5, verbose=0).history["loss"]
    assert last < first
    # DINOv2 derives a weight from another one on every load.
    for _ in range(2 if name == "dinov2" else 1):
        trained = efficient
        efficient = saved_and_loaded(trained, tmp_path)
    families.assert_same_outputs(trained, efficient, data)


def test_padding_is_not_read():
    backbone = convert_backbone(families.make("bert"), INEXACT)
    data = families.inputs(backbone)
    before = families.outputs(backbone, data)
    hidden = data["padding_mask"] == 0
    data["token_ids"][hidden] = (data["token_ids"][hidden] + 1) % 50
    for now, then in zip(families.outputs(backbone, data), before, strict=True):
        np.testing.assert_allclose(now, then, atol=1e-6)
    # Tokens that are not padding have an effect.
    data["padding_mask"][:] = 1
    now, then = (
        next(output for output in outputs if len(output) == families.BATCH)
        for outputs in (families.outputs(backbone, data), before)
    )
    assert np.max(abs(now - then)) > 1e-4


def test_mistral_keys_out_of_its_window_are_no_padding():
    # Its mask hides far keys from the last query, but they must stay visible.
    full = families.make("mistral", sliding_window=None)
    windowed = families.make("mistral", sliding_window=2)
    data = families.inputs(full)
    efficient = convert_backbone(windowed, families.LOCAL)
    families.assert_same_outputs(full, efficient, data)
    kept = convert_backbone(windowed, "local:window=2")
    families.assert_same_outputs(windowed, kept, data)


@pytest.mark.any_backend
def test_a_layer_that_is_left_out_keeps_softmax():
    backbone = families.make("bert")
    for attention in (
        INEXACT,
        PerformerAttention(3, 4, num_features=4, seed=1),
        keras.saving.serialize_keras_object(PerformerAttention(1, 4, num_features=4)),
        PerformerAttention,
    ):
        efficient = convert_backbone(backbone, attention, layers=[1])
        first, second = efficient.transformer_layers
        assert type(first._self_attention_layer) is keras.layers.MultiHeadAttention
        layer = second._self_attention_layer
        assert isinstance(layer.attention, PerformerAttention)
        assert (
            layer.attention.num_heads,
            layer.attention.key_dim,
            layer.attention.dropout,
        ) == (
            2,
            8,
            0.1,
        )
        assert efficient.get_config()["attention_layers"] == [1]
    assert layer.attention.num_features is None


@pytest.mark.any_backend
def test_each_layer_may_have_another_attention(tmp_path):
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    attention = [LocalAttention(1, 2, window=2), "vq:window=1,num_codes=3"]
    # Codes are fitted; the window has nothing to fit.
    both = convert_backbone(backbone, attention, calibrate=data)
    local, vq = families.efficient_layers(both)
    assert isinstance(local, LocalAttention) and local.window == 2
    assert isinstance(vq, VQAttention) and vq.num_codes == 3
    families.assert_same_outputs(both, saved_and_loaded(both, tmp_path), data, 1e-6)

    alone = [
        convert_backbone(backbone, attention[0], [0]),
        convert_backbone(backbone, attention[1], [1], calibrate=data),
    ]
    np.testing.assert_array_equal(
        families.efficient_layers(alone[1])[0].codebook, vq.codebook
    )

    *errors, of_both = (
        families.output_error(model, backbone, data) for model in (*alone, both)
    )
    least = int(np.argmin(errors))
    budget = (errors[least] + max(of_both, *errors)) / 2
    chosen = convert_backbone(
        backbone, attention, "auto", calibrate=data, budget=budget
    )
    assert chosen.attention_layers == [least]
    families.assert_same_outputs(alone[least], chosen, data)

    for layers, count in ((None, 2), ([1], 1)):
        with pytest.raises(ValueError, match=f"each of the {count} .* list of 3"):
            convert_backbone(backbone, ["local"] * 3, layers)
    patterns = {
        "none of the 2": {"full": 1},
        "dict of names to positive integers": {"local:window=2": 0},
        "must be a dict": {3: 1},
    }
    for message, pattern in patterns.items():
        with pytest.raises(ValueError, match=message):
            convert_backbone(backbone, pattern)
    pattern = {"local:window=2": 1}
    for layers in ([0], "auto"):
        budget = dict(calibrate=families.inputs(backbone), budget=0.1)
        budget = budget if layers == "auto" else {}
        with pytest.raises(ValueError, match="says which layers"):
            convert_backbone(backbone, pattern, layers, **budget)
    with pytest.raises(TypeError, match="attention=3"):
        convert_backbone(backbone, ["local", 3])


@pytest.mark.any_backend
@pytest.mark.parametrize("layers", [np.array([1]), [np.int64(1)]], ids=str)
def test_indices_may_be_numpy_integers(layers):
    efficient = convert_backbone(families.make("distil_bert"), families.LOCAL, layers)
    assert json.loads(json.dumps(efficient.get_config()))["attention_layers"] == [1]
    assert [site.is_converted for site in efficient.attention_sites] == [False, True]


@pytest.mark.parametrize("name", ["distil_bert", "llama"])
def test_precision_stays(name):
    _, _, exact = families.FAMILIES[name]
    backbone = families.make(name, num_layers=1, dtype="mixed_bfloat16")
    efficient = convert_backbone(backbone, exact)
    data = families.inputs(backbone)
    assert efficient.dtype_policy.name == "mixed_bfloat16"
    assert keras.backend.standardize_dtype(efficient(data).dtype) == "bfloat16"
    assert {weight.dtype for weight in efficient.weights} == {"float32"}
    families.assert_same_outputs(backbone, efficient, data, 0.05)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lora_stays_and_can_be_added(name, tmp_path):
    # Its codebooks are layers with weights, which the original lacks.
    exact = "vq:window=64,num_codes=2"
    backbone = families.make(name)
    plain = families.make(name)
    backbone.enable_lora(2)
    families.randomize(backbone, seed=1)
    efficient = convert_backbone(backbone, exact)
    data = families.inputs(backbone)
    families.assert_same_outputs(backbone, efficient, data)
    trainable = [weight.path for weight in backbone.trainable_weights]
    assert [weight.path for weight in efficient.trainable_weights] == trainable

    # The original and the copy read each other's files, and enable LoRA for them.
    stock = {weight.path: weight for weight in backbone.weights}
    for weight in plain.weights:
        weight.assign(stock[weight.path])
    other = convert_backbone(plain, exact)
    file = str(tmp_path / "model.lora.h5")
    for source, target in ((backbone, other), (efficient, plain)):
        source.save_lora_weights(file)
        target.load_lora_weights(file)
        families.assert_same_outputs(backbone, target, data)
        assert len(target.trainable_weights) == len(trainable)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_quantisation_stays_and_can_be_added(name, tmp_path, monkeypatch):
    # Keras collects garbage for each replaced weight, which takes seconds.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    backbone = families.make(name, num_layers=1)
    late = convert_backbone(backbone, families.LOCAL)
    backbone.quantize("int8")
    late.quantize("int8")
    early = convert_backbone(backbone, families.LOCAL)
    data = families.inputs(backbone)
    # A rounding error may lead to another quantised integer.
    families.assert_same_outputs(backbone, early, data, 0.02)
    families.assert_same_outputs(backbone, late, data, 0.02)
    families.assert_same_outputs(early, saved_and_loaded(early, tmp_path), data)
    late.save_to_preset(tmp_path / "preset")
    loaded = type(late).from_preset(str(tmp_path / "preset"))
    families.assert_same_outputs(early, loaded, data)


@pytest.mark.any_backend
def test_a_checkpoint_of_transformers_is_read_before_it_is_converted(tmp_path):
    config = dict(
        model_type="llama",
        vocab_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=False,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = efficient_backbone(keras_hub.models.LlamaBackbone)
    with pytest.raises(ValueError, match="`convert_backbone`.*model_type='llama'"):
        made.from_preset(str(tmp_path), load_weights=False)
    stock = keras_hub.models.Backbone.from_preset(str(tmp_path), load_weights=False)
    assert len(families.efficient_layers(convert_backbone(stock, families.LOCAL))) == 1


@pytest.mark.any_backend
@pytest.mark.parametrize("config", [{"architecture": "resnet18"}, {"other": 1}])
def test_files_of_other_libraries_are_refused_by_keras_hub(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = efficient_backbone(keras_hub.models.ViTBackbone)
    with pytest.raises(ValueError) as stock:
        keras_hub.models.ViTBackbone.from_preset(str(tmp_path))
    with pytest.raises(ValueError) as received:
        made.from_preset(str(tmp_path))
    expected = str(stock.value).replace("ViTBackbone", "EfficientViTBackbone")
    assert str(received.value) == expected


FRESH_PROCESS = """
import sys
import keras, keras_hub, numpy as np
from keras_efficient_attn import models
from keras_efficient_attn.models.conversion import backbone

folder = sys.argv[1]
assert not backbone.EfficientBackbone.__subclasses__()
loaded = keras.saving.load_model(folder + "/model.keras")
made = backbone.EfficientBackbone.__subclasses__()
assert [c.__name__ for c in made] == ["EfficientBertBackbone"], made
assert type(loaded) is models.efficient_backbone(keras_hub.models.BertBackbone)
again = keras_hub.models.Backbone.from_preset(folder + "/gpt2")
assert type(again) is models.efficient_backbone(keras_hub.models.GPT2Backbone)
task = keras_hub.models.CausalLM.from_preset(folder + "/gpt2", preprocessor=None)
assert type(task) is keras_hub.models.GPT2CausalLM
assert type(task.backbone) is type(again)
data = dict(np.load(folder + "/data.npz"))
output = keras.ops.convert_to_numpy(loaded(data)["sequence_output"])
np.savez(folder + "/outputs.npz", loaded=output)
"""


@pytest.mark.any_backend
def test_classes_are_made_when_a_file_names_them(tmp_path):
    backbone = convert_backbone(families.make("bert"), INEXACT)
    backbone.save(tmp_path / "model.keras")
    gpt2 = convert_backbone(families.make("gpt2"), INEXACT)
    gpt2.save_to_preset(str(tmp_path / "gpt2"))
    data = families.inputs(backbone)
    np.savez(tmp_path / "data.npz", **data)
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path)], check=True, timeout=300
    )
    received = np.load(tmp_path / "outputs.npz")["loaded"]
    expected = keras.ops.convert_to_numpy(backbone(data)["sequence_output"])
    np.testing.assert_allclose(received, expected, atol=1e-5)


@pytest.mark.any_backend
def test_stock_classes_stay_apart_from_the_registry_entries():
    stock = keras_hub.models.XLMRobertaBackbone
    entry = keras.saving.get_registered_object(
        "keras_efficient_attn>EfficientXLMRobertaBackbone"
    )
    assert issubclass(entry, efficient_backbone(stock)) and entry == stock
    assert len({entry, stock, efficient_backbone(stock)}) == 3
    with pytest.raises(TypeError, match="stock_class"):
        efficient_backbone(keras.Model)


@pytest.mark.any_backend
def test_each_model_is_walked_once(monkeypatch):
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    walked = []

    def find_sites_of(model):
        walked.append(model)
        return find_sites(model)

    monkeypatch.setattr(targets, "find_sites", find_sites_of)
    for options, models in (
        ({}, 2),
        ({"calibrate": data}, 2),
        # All layers are within the budget: the trial is the copy.
        ({"layers": "auto", "budget": 1e3, "calibrate": data}, 2),
    ):
        walked.clear()
        convert_backbone(backbone, "vq:window=1,num_codes=3", **options)
        assert len(walked) == len({id(model) for model in walked}) == models, options


@pytest.mark.any_backend
def test_a_gaussian_kernel_is_not_softmax():
    """It weighs the trained keys by their distance, and so by their norms."""
    backbone = families.make("gpt2", num_layers=1)
    efficient = convert_backbone(backbone, "softmax:kernel=gaussian")
    report = swap_report(backbone, efficient, families.inputs(backbone))
    assert 1e-4 < report.layers[0].attention < 1


@pytest.mark.any_backend
def test_refusals():
    make = families.make
    one = {"num_layers": 1}
    bloom = keras_hub.models.BloomBackbone(
        vocabulary_size=50,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
    )
    deberta = keras_hub.models.DebertaV3Backbone(**families.STOCK | one)
    for backbone in (bloom, deberta):
        with pytest.raises(ValueError, match="cannot be replaced: .*position|distance"):
            convert_backbone(backbone, families.LOCAL)
    both_ways = make("gemma3", use_bidirectional_attention=True, **one)
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        convert_backbone(both_ways, "local")
    capped = make("gemma3", attention_logit_soft_cap=4.0, **one)
    with pytest.raises(ValueError, match="caps its logits.*logit_soft_cap=4.0"):
        convert_backbone(capped, "local")
    capped = make("gemma", attention_logit_soft_cap=5.0, **one)
    with pytest.raises(ValueError, match="caps its logits.*logit_soft_cap=5.0"):
        convert_backbone(capped, families.LOCAL)
    bert, gpt2, llama = (make(name, **one) for name in ("bert", "gpt2", "llama"))
    efficient = convert_backbone(bert, families.LOCAL)
    for backbone, attention, layers, message in (
        (bert, "softmax", None, "leave it out of `layers`"),
        (bert, "reformer", None, "projection of the keys"),
        (bert, "performer:num_heads=4", None, "leave out num_heads"),
        (bert, "performer:window=0", None, "transformer_layer_0.*`window`"),
        (bert, families.LOCAL, [1], r"from 0 to 0.*layers=\[1\]"),
        (bert, families.LOCAL, 1, "layers=1"),
        (bert, families.LOCAL, [], r"layers=\[\]"),
        (bert, families.LOCAL, [False], r"indices.*layers=\[False\]"),
        (bert, families.LOCAL, np.array([True]), r"layers=array\(\[ True\]\)"),
        (gpt2, "performer:feature_map=favor++", None, "no causal form"),
        (llama, "local:rotary_wavelength=50", None, "rotates .* itself"),
        (efficient, families.LOCAL, None, "converted already"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_backbone(backbone, attention, layers)
    with pytest.raises(TypeError, match="backbone="):
        convert_backbone(keras.Sequential(), families.LOCAL)
    with pytest.raises(TypeError, match="attention=3"):
        convert_backbone(bert, 3)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_the_bias_of_t5_stays_in_the_window(stack):
    backbone = families.make("t5")
    efficient = convert_backbone(backbone, "local:window=3")
    old, new = (
        [
            layer.self_attention
            for layer in getattr(model, f"{stack}_transformer_layers")
        ]
        for model in (backbone, efficient)
    )
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype("float32")
    distances = np.arange(9)[:, None] - np.arange(9)
    seen = abs(distances) < 3
    seen = seen & (distances >= 0) if stack == "decoder" else seen
    # The first layer of a stack has the bias of all of its layers.
    bias = ops.convert_to_numpy(old[0].compute_bias(9, 9))
    assert np.ptp(bias[..., seen]) > 0.1
    bias = np.where(seen, bias, -1e9).astype("float32")
    # What a block passes to its first layer.
    mask = np.tril(np.ones((2, 9, 9), bool)) if stack == "decoder" else None
    for softmax, adapter in zip(old, new, strict=True):
        expected = softmax(x, position_bias=bias)[0]
        received, no_bias, _ = adapter(x, mask=mask)
        np.testing.assert_allclose(
            *map(ops.convert_to_numpy, (received, expected)), atol=1e-5
        )
        assert no_bias.shape[-2:] == (0, 0)


@pytest.mark.any_backend
def test_what_t5_refuses():
    backbone = families.make("t5")
    data = families.inputs(backbone)
    for options, message in (
        (
            dict(attention="local", layers=[0]),
            r"together: pass all of \[0, 1\].*layers=\[0\]",
        ),
        (dict(attention={"local": 1, "full": 1}), "replaced together"),
        (
            dict(attention="local", layers="auto", budget=1.0, calibrate=data),
            "chooses single layers",
        ),
        (dict(attention="performer"), "use a layer with a window.*PerformerAttention"),
        (dict(attention="local:query_block=4"), "use a layer with a window"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_backbone(backbone, **options)
    block = backbone.encoder_transformer_layers[1]
    with pytest.raises(ValueError, match="convert the whole model"):
        replace_attention(block, "local")
    assert not families.efficient_layers(backbone)
    converted = convert_backbone(backbone, "local")
    states = np.zeros((1, 4, 16), "float32")
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(1, 4, 4\)"):
        converted.decoder_transformer_layers[0](
            states,
            attention_mask=np.ones((1, 4, 4)),
            encoder_hidden_states=states,
            use_causal_mask=True,
        )
    with pytest.raises(ValueError, match=r"attention_mask.shape=\(1, 4, 4\)"):
        converted.decoder_transformer_layers[1](
            states,
            attention_mask=np.ones((1, 4, 4)),
            position_bias=np.zeros((1, 2, 0, 0)),
            encoder_hidden_states=states,
            use_causal_mask=True,
        )
