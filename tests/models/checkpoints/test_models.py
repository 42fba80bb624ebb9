"""What can be done with a model that was read from a checkpoint."""

import json
import shutil
import weakref

import keras
import numpy as np
import pytest
import sentencepiece

from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    preset_names,
)
from keras_efficient_attn.models.checkpoints import conversion
from keras_efficient_attn.models.checkpoints.files import TensorFiles
from tests.autodiff import to_numpy
from tests.models.checkpoints.cases import FOLDERS, ROOT, golden, inputs, load
from tests.saving import saved_and_loaded

TYPES = ["gated_deltanet_values", "olmo_hybrid", "reformer_lsh"]


def logits(model, ids):
    return to_numpy(model(inputs(ids)))


def next_tokens(ids):
    return inputs(ids), np.roll(ids, -1, axis=1)


@pytest.mark.parametrize("name", TYPES)
def test_generates_the_most_likely_tokens(name):
    model, ids = load(name), golden(name)[0][:1, :4]
    model.compile(sampler="greedy")
    made = model.generate(inputs(ids), max_length=8, stop_token_ids=None)
    received = np.asarray(made["token_ids"])
    for t in range(4, 8):
        expected = logits(model, received[:, :t])[0, -1].argmax()
        assert received[0, t] == expected


@pytest.mark.parametrize("rank", [None, 2], ids=["full", "lora"])
def test_is_fine_tuned_saved_and_exported(rank, tmp_path):
    model, (ids, before) = load("gated_deltanet_values"), golden(TYPES[0])
    if rank is not None:
        model.backbone.enable_lora(rank)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
    history = model.fit(*next_tokens(ids), epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    expected = logits(model, ids)
    assert np.abs(expected - before).max() > 0.01
    model.export_to_transformers(tmp_path / "folder")
    again = EfficientCausalLM.from_preset(str(tmp_path / "folder"))
    np.testing.assert_allclose(logits(again, ids), expected, rtol=0, atol=1e-4)
    again = saved_and_loaded(model, tmp_path)
    np.testing.assert_allclose(logits(again, ids), expected, rtol=0, atol=1e-4)
    if rank is None:
        model.save_to_preset(str(tmp_path / "preset"))
        again = EfficientCausalLM.from_preset(str(tmp_path / "preset"))
        np.testing.assert_allclose(logits(again, ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", TYPES)
def test_is_quantised(name):
    model, (ids, expected) = load(name), golden(name)
    model.quantize("int8")
    received = logits(model, ids)
    assert 0 < np.abs(received - expected).mean() < 0.15 * expected.std()
    with pytest.raises(ValueError, match="export it before.*int8"):
        model.export_to_transformers("nowhere")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.one_backend
def test_exported_tensors_are_those_that_were_read(name, tmp_path):
    backbone = EfficientTransformerBackbone.from_preset(str(ROOT / name))
    size = 20_000 if name == "kda" else 10**9
    backbone.export_to_transformers(tmp_path, max_shard_size=size)
    files = [TensorFiles(folder) for folder in (str(ROOT / name), str(tmp_path))]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or name != "kda"
    # The same under another of its names, and cut elsewhere: read again instead.
    if name.startswith(("olmo", "reformer")):
        again = EfficientTransformerBackbone.from_preset(str(tmp_path))
        for one, other in zip(again.weights, backbone.weights, strict=True):
            if "rotations" not in one.path:
                np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    else:
        assert files[0].names - {"lm_head.weight"} == files[1].names - {
            "lm_head.weight"
        }
        for tensor in files[1].names:
            expected = files[0].read(tensor)
            np.testing.assert_array_equal(files[1].read(tensor), expected)
    config = [
        json.loads((f / "config.json").read_text()) for f in (ROOT / name, tmp_path)
    ]
    assert config[0] == config[1]


def test_dtypes_and_random_weights(tmp_path):
    (ids, expected), folder = golden("gla"), str(ROOT / "gla")
    half = EfficientCausalLM.from_preset(folder, dtype="bfloat16")
    assert {v.dtype for v in half.backbone.trainable_variables} == {"bfloat16"}
    assert np.abs(logits(half, ids) - expected).mean() < 0.1
    # A file in bfloat16.
    half.export_to_transformers(tmp_path)
    again = EfficientCausalLM.from_preset(str(tmp_path))
    assert np.abs(logits(again, ids) - expected).mean() < 0.1
    random = EfficientCausalLM.from_preset(folder, load_weights=False)
    assert np.abs(logits(random, ids) - expected).max() > 0.5


def test_a_variable_has_no_value_before_its_tensor_is_read(monkeypatch):
    alive, most, events = set(), 0, []
    read, initialize = TensorFiles.read, keras.Variable._initialize

    def counted_read(self, name):
        nonlocal most
        tensor = read(self, name)
        alive.add(name)
        weakref.finalize(tensor, alive.discard, name)
        most = max(most, len(alive))
        events.append("read")
        return tensor

    def counted_initialize(self, value):
        initialize(self, value)
        events.append("value")

    monkeypatch.setattr(TensorFiles, "read", counted_read)
    monkeypatch.setattr(keras.Variable, "_initialize", counted_initialize)
    backbone = EfficientTransformerBackbone.from_preset(str(ROOT / "gated_deltanet"))
    assert events == ["read", "value"] * len(backbone.variables)
    # The one before is released when the next is there.
    assert most <= 2


def test_after_an_error_other_models_can_be_read(monkeypatch):
    read, names = TensorFiles.read, []

    def failing(self, name):
        # When variables before this one have their values.
        names.append(name)
        if len(names) == 3:
            raise OSError(name)
        return read(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFiles, "read", failing)
        with pytest.raises(OSError, match="model"):
            load("gla")
    ids, expected = golden("gla")
    received = logits(load("gla"), ids)
    np.testing.assert_allclose(received, expected, rtol=0, atol=2e-3)


def changed(tmp_path, name, **options):
    folder = tmp_path / "folder"
    shutil.copytree(ROOT / name, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    return str(folder)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gla", dict(attnres_block_size=2), "`attnres_block_size`.*=2"),
        ("gla", dict(hidden_act="powlu"), "`hidden_act`.*'powlu'"),
        ("gla", dict(feature_map="gelu"), "`feature_map`.*'gelu'"),
        ("gla", dict(quantization_config={"bits": 4}), "quantization_config.*bits"),
        ("gla", dict(is_encoder_decoder=True), "`is_encoder_decoder`.*=True"),
        ("delta_net", dict(use_rope=True), "`use_rope`.*=True"),
        ("linear_attn", dict(tie_feature_map_qk=True), "`tie_feature_map_qk`.*=True"),
        (
            "olmo_hybrid",
            dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
            "`rope_type`.*'yarn'",
        ),
        ("reformer_lsh", dict(lsh_num_chunks_before=2), "`lsh_num_chunks_before`.*=2"),
        ("reformer_lsh", dict(is_decoder=False), "`is_decoder`.*=False"),
        ("gla", dict(model_type="mamba"), "`model_type`.*'mamba'"),
        ("gla", dict(attn={"layers": [0]}), "`attn.num_heads`.*=None"),
        ("gla", dict(attn={"num_heads": 2, "layers": 0}), "`layers` of `attn`.*=0"),
        ("gla", dict(num_heads=0), "`num_heads`.*=0"),
        ("gla", dict(hidden_size="16"), "`hidden_size`.*'16'"),
        ("gated_deltanet", dict(head_dim=None), "`head_dim`.*=None"),
        ("gated_deltanet", dict(expand_v=None), "`expand_v`.*=None"),
        ("gla", dict(expand_k="1"), "`expand_k`.*'1'"),
        ("retnet", dict(hidden_ratio="4"), "`hidden_ratio`.*'4'"),
        ("olmo_hybrid", dict(num_attention_heads=0), "`num_attention_heads`.*=0"),
        ("reformer_lsh", dict(lsh_attn_chunk_length=0), "`lsh_attn_chunk_length`.*=0"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_other_options_are_refused_before_weights_are_read(
    name, options, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(conversion, "TensorFiles", None)
    with pytest.raises(ValueError, match=message):
        EfficientTransformerBackbone.from_preset(changed(tmp_path, name, **options))


@pytest.mark.parametrize(
    ("name", "removed", "options"),
    [
        ("gla", ["norm_eps"], dict(rms_norm_eps=1e-6, share_conv_kernel=True)),
        ("gla_unfused", [], dict(rms_norm_eps=0.5, use_gv=True)),
        ("olmo_hybrid_nope", ["rope_parameters"], dict(rope_theta=None)),
        ("olmo_hybrid", ["rope_parameters"], {}),
        ("reformer_lsh", [], dict(output_past=True, sinusoidal_pos_embds=False)),
    ],
    ids=str,
)
@pytest.mark.any_backend
def test_older_files_have_other_names(name, removed, options, tmp_path):
    folder = changed(tmp_path, name, **options)
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    for option in removed:
        config.pop(option, None)
    path.write_text(json.dumps(config))
    ids, expected = golden(name)
    received = logits(EfficientCausalLM.from_preset(folder), ids)
    np.testing.assert_allclose(received, expected, rtol=0, atol=2e-3)


@pytest.mark.any_backend
def test_heads_need_not_divide_the_width(tmp_path):
    folder = changed(tmp_path, "gated_deltanet", num_heads=3)
    backbone = EfficientTransformerBackbone.from_preset(folder, load_weights=False)
    assert backbone.hidden_dim == 32 and backbone.num_heads == 3


@pytest.mark.any_backend
def test_a_configuration_without_weights_names_handles():
    with pytest.raises(ValueError, match="load 'hf://fla-hub/retnet-1.3B-100B'"):
        EfficientTransformerBackbone.from_preset("retnet_1.3b")
    assert preset_names()["retnet_1.3b"] == ("hf://fla-hub/retnet-1.3B-100B",)
    assert preset_names()["performer_6l"] == ()


@pytest.mark.any_backend
def test_other_tensors_are_refused(tmp_path):
    folder = changed(tmp_path, "gla", use_output_gate=False)
    with pytest.raises(ValueError, match="a tensor model.layers.0.attn.g_norm.weight"):
        EfficientTransformerBackbone.from_preset(folder)
    shutil.rmtree(folder)
    folder = changed(tmp_path, "gla", intermediate_size=48)
    with pytest.raises(ValueError, match=r"the shape \(48, 32\).*\(256, 32\)"):
        EfficientTransformerBackbone.from_preset(folder)
    shutil.rmtree(folder)
    folder = changed(tmp_path, "gla", num_hidden_layers=1)
    with pytest.raises(ValueError, match="no counterpart for these.*model.layers.1"):
        EfficientTransformerBackbone.from_preset(folder)
    with pytest.raises(ValueError, match="`positions` is set by the.*rotary"):
        EfficientTransformerBackbone.from_preset(folder, positions="rotary")
    (tmp_path / "folder" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must have model.safetensors"):
        EfficientTransformerBackbone.from_preset(folder)
    backbone = EfficientTransformerBackbone(40, 1, 2, 8, 8)
    with pytest.raises(ValueError, match="Only a backbone that `from_preset` made"):
        backbone.export_to_transformers(tmp_path)


def test_layouts_split_its_weights(backend):
    if backend != "jax":
        pytest.skip("layout maps are for JAX")
    devices = keras.distribution.list_devices()[:1]
    mesh = keras.distribution.DeviceMesh((1, 1), ("batch", "model"), devices)
    layouts = EfficientTransformerBackbone.get_layout_map(mesh)
    ids, expected = golden("gated_deltanet_values")
    with keras.distribution.ModelParallel(layout_map=layouts).scope():
        model = load("gated_deltanet_values")
        received = logits(model, ids)
    np.testing.assert_allclose(received, expected, rtol=0, atol=2e-3)
    split = [v.path for v in model.backbone.variables if layouts[v.path] is not None]
    for name in ("query", "value", "output_gate", "decay", "beta", "attention_output"):
        assert any(f"/attention/{name}/kernel" in path for path in split), name


def test_as_the_published_class(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for name in ("olmo_hybrid", "olmo_hybrid_nope", "reformer_lsh"):
        model, (ids, expected) = load(name), golden(name)
        model.export_to_transformers(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        published = getattr(transformers, config["architectures"][0])
        published = published.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            received = published(torch.as_tensor(ids).long(), use_cache=False).logits
        np.testing.assert_allclose(received.numpy(), expected, rtol=0, atol=1e-4)


WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat", "on", "mat"]


def with_tokenizer(tmp_path, template="<s> $A"):
    tokenizers = pytest.importorskip("tokenizers")
    folder = changed(tmp_path, "gla")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(f"{folder}/tokenizer.json")
    return folder


def test_generates_text_with_the_tokenizer_of_the_folder(tmp_path):
    folder = with_tokenizer(tmp_path)
    model = EfficientCausalLM.from_preset(folder)
    model.preprocessor.sequence_length = 10
    prepared = model.preprocessor.generate_preprocess(["the cat sat"], 6)
    np.testing.assert_array_equal(
        np.asarray(prepared["token_ids"]), [[1, 3, 4, 5, 0, 0]]
    )
    model.compile(sampler="greedy")
    text = model.generate("the cat sat", max_length=6, stop_token_ids=None)
    assert text.startswith("the cat sat")
    model.save_to_preset(str(tmp_path / "preset"))
    again = EfficientCausalLM.from_preset(str(tmp_path / "preset"))
    again.compile(sampler="greedy")
    assert again.generate("the cat sat", max_length=6, stop_token_ids=None) == text
    model.export_to_transformers(tmp_path / "exported")
    again = EfficientCausalLM.from_preset(str(tmp_path / "exported"))
    again.compile(sampler="greedy")
    assert again.generate("the cat sat", max_length=6, stop_token_ids=None) == text
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    texts = ["the cat sat on the mat", "the mat sat"]
    first, *_, last = model.fit(texts, epochs=5, verbose=0).history["loss"]
    assert last < first


@pytest.mark.any_backend
@pytest.mark.parametrize("template", ["$A", "$A </s>", "<s> $A", "<s> $A </s>"])
def test_texts_begin_as_the_file_says(template, tmp_path):
    folder = with_tokenizer(tmp_path, template)
    file = pytest.importorskip("tokenizers").Tokenizer.from_file(
        f"{folder}/tokenizer.json"
    )
    preprocessor = EfficientCausalLM.from_preset(folder).preprocessor
    expected = [token for token in file.encode("the cat").ids if token != 2]
    for made in (
        preprocessor.generate_preprocess(["the cat"], 6),
        preprocessor(["the cat"], sequence_length=6)[0],
    ):
        tokens = np.asarray(made["token_ids"])[0]
        assert [token for token in tokens if token not in (0, 2)] == expected


@pytest.mark.any_backend
def test_texts_of_numpy_integers(tmp_path):
    folder = with_tokenizer(tmp_path)
    tokenizer = EfficientCausalLM.from_preset(folder).preprocessor.tokenizer
    ids = np.array([3, 4, 5])
    assert tokenizer.detokenize(list(ids)) == tokenizer.detokenize(ids) == "the cat sat"
    assert tokenizer.detokenize([list(ids), [3]]) == ["the cat sat", "the"]


def test_generates_text_with_a_sentencepiece_model(tmp_path):
    folder, text = changed(tmp_path, "gla"), "the cat sat"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the mat sat on the cat"]),
        model_prefix=f"{folder}/tokenizer",
        vocab_size=40,
        user_defined_symbols=[f"<{i}>" for i in range(24)],
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(f"{folder}/tokenizer.model")
    ids = reference.encode(text)
    assert len(ids) > 3 and reference.bos_id() == 1
    model = EfficientCausalLM.from_preset(folder)
    assert model.preprocessor.tokenizer.vocabulary_size() == reference.vocab_size()
    prepared = model.preprocessor.generate_preprocess([text], 16)
    expected = np.pad([1, *ids], (0, 15 - len(ids)))
    np.testing.assert_array_equal(np.asarray(prepared["token_ids"]), [expected])
    assert model.preprocessor.tokenizer.detokenize(ids) == text
    model.compile(sampler="greedy")
    made = model.generate(text, max_length=16, stop_token_ids=None)
    assert made.startswith(text)
    model.save_to_preset(str(tmp_path / "preset"))
    model.export_to_transformers(tmp_path / "exported")
    for name in ("preset", "exported"):
        again = EfficientCausalLM.from_preset(str(tmp_path / name))
        again.compile(sampler="greedy")
        assert again.generate(text, max_length=16, stop_token_ids=None) == made


def test_without_a_tokenizer_it_says_what_is_missing():
    model = load("gla")
    assert model.preprocessor is None
    for texts in ("the cat", ["the cat"]):
        with pytest.raises(ValueError, match="must have tokenizer.json or.*the cat"):
            model.generate(texts)
