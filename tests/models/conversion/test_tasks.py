"""KerasHub's tasks on converted backbones: training, generation, presets."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops
from keras_hub import models

from keras_efficient_attn.models import convert_backbone
from keras_efficient_attn.models.conversion.sites import find_sites
from tests.models.conversion import families

# Not exact: that it is computed in another way shows.
PERFORMER = "performer:window=2,num_features=4"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox"]


def array(x):
    return ops.convert_to_numpy(x)


@pytest.mark.parametrize(
    "name, task, attention",
    [
        ("gpt2", models.GPT2CausalLM, PERFORMER),
        ("mistral", models.MistralCausalLM, "local:window=2"),
        ("gemma", models.GemmaCausalLM, "vq:window=2,num_codes=4"),
    ],
)
def test_the_cache_gives_what_whole_sequences_give(name, task, attention):
    task = task(convert_backbone(families.make(name), attention))
    data = families.inputs(task.backbone, padded=False)
    whole = array(task(data))
    tokens = ops.convert_to_tensor(data["token_ids"])
    hidden, cache = task._build_cache(tokens)
    np.testing.assert_allclose(
        array(hidden), array(task.backbone(data)), rtol=0, atol=2e-5
    )
    # The cache also has later tokens, which are to have no effect.
    logits, _, _ = task.call_with_cache(tokens[:, 3:4], cache, 3)
    np.testing.assert_allclose(array(logits), whole[:, 3:4], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_of_a_cache_is_not_read(name):
    backbone = families.make(name, num_layers=1)
    efficient = convert_backbone(backbone, families.LOCAL)
    old, new = (find_sites(m)[0].layer for m in (backbone, efficient))
    heads, dim = new._for_query_heads(new._key_dense(np.zeros((1, 1, 16)))).shape[-2:]
    heads = new.num_key_value_heads or heads
    random = np.random.default_rng(0)
    cache = random.normal(size=(2, 2, 6, heads, dim)).astype("float32")
    x = random.normal(size=(2, 1, 16)).astype("float32")
    # Four tokens so far, the first two of one row padding; one more of each row.
    mask = np.array([[[0, 0, 1, 1, 1, 0]], [[1, 1, 1, 1, 1, 0]]], "bool")
    options = dict(
        attention_mask=mask,
        cache=ops.convert_to_tensor(cache),
        cache_update_index=4,
    )
    inputs = (x,) if name == "llama" else (x, x)
    for first, second in zip(
        old(*inputs, **options), new(*inputs, **options), strict=True
    ):
        np.testing.assert_allclose(array(second), array(first), atol=1e-5)


def test_generate_is_greedy():
    backbone = families.make("gpt2", num_layers=1)
    task = models.GPT2CausalLM(convert_backbone(backbone, PERFORMER))
    data = families.inputs(task.backbone, padded=False)
    data["padding_mask"][:, 3:] = 0
    task.compile(sampler="greedy")
    made = task.generate(data, stop_token_ids=None)
    tokens = array(made["token_ids"])
    np.testing.assert_array_equal(tokens[:, :3], data["token_ids"][:, :3])
    logits = array(task({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))
    np.testing.assert_array_equal(tokens[:, 3:], logits[:, 2:-1].argmax(-1))


def test_generate_with_an_encoder_is_greedy():
    backbone = families.make("bart", num_layers=1)
    task = models.BartSeq2SeqLM(convert_backbone(backbone, PERFORMER))
    data = families.inputs(task.backbone)
    # The order in which `layers` counts them.
    blocks = [site.block.name for site in find_sites(task.backbone)]
    assert blocks == ["transformer_encoder_layer_0", "transformer_decoder_layer_0"]
    data["decoder_padding_mask"][:] = 0
    data["decoder_padding_mask"][:, :2] = 1
    task.compile(sampler="greedy")
    tokens = array(task.generate(data, stop_token_ids=None)["decoder_token_ids"])
    np.testing.assert_array_equal(tokens[:, :2], data["decoder_token_ids"][:, :2])
    data["decoder_token_ids"] = tokens
    data["decoder_padding_mask"][:] = 1
    logits = array(task(data))
    np.testing.assert_array_equal(tokens[:, 2:], logits[:, 1:-1].argmax(-1))


def test_a_classifier_trains_and_comes_back_from_a_preset(tmp_path):
    backbone = families.make("bert", num_layers=1, dropout=0.0)
    backbone = convert_backbone(backbone, PERFORMER)
    tokenizer = models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=6)
    task = models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor)
    backbone.enable_lora(2)
    before = {weight.path: array(weight) for weight in task.weights}
    task.compile(
        keras.optimizers.SGD(1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() != "torch",
    )
    texts = ["the quick fox", "quick"]
    history = task.fit(np.array(texts), np.array([0, 1]), batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    changed = {
        path.rsplit("/", 1)[-1]
        for path, weight in before.items()
        if "/self_attention_layer/" in path
        and (array(weight_of(task, path)) != weight).any()
    }
    # As in KerasHub, the biases of what has LoRA train too.
    assert changed == {"bias", "lora_kernel_b"}

    # By the name of the kind of task, and of the stock task.
    folder = str(tmp_path / "preset")
    task.save_to_preset(folder)
    loaded = keras_hub.models.TextClassifier.from_preset(folder)
    assert type(loaded) is models.BertTextClassifier
    assert type(loaded.backbone) is type(backbone)
    assert loaded.preprocessor.sequence_length == 6
    data = preprocessor(texts)
    expected = array(task(data))
    np.testing.assert_allclose(array(loaded(data)), expected, rtol=0, atol=1e-5)
    stock = models.BertTextClassifier.from_preset(folder, load_weights=False)
    assert type(stock.backbone) is type(backbone)
    again = keras_hub.models.Backbone.from_preset(folder)
    families.assert_same_outputs(loaded.backbone, again, data)
    found = keras_hub.models.TextClassifierPreprocessor.from_preset(folder)
    assert type(found) is models.BertTextClassifierPreprocessor

    file = tmp_path / "task.keras"
    task.save(file)
    other = keras.saving.load_model(file)
    np.testing.assert_allclose(array(other(data)), expected, rtol=0, atol=1e-5)


def weight_of(model, path):
    return next(weight for weight in model.weights if weight.path == path)
