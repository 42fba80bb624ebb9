"""Generation of converted models with states gives the tokens of whole calls."""

import functools

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops
from keras_hub import models

from keras_efficient_attn.models import convert_backbone
from keras_efficient_attn.models.conversion.generation import CausalMethods
from keras_efficient_attn.models.keras_hub_internals import wrap_generate_step
from tests.models import cases
from tests.models.conversion import families

PERFORMER = "performer:feature_map=elu"
VQ = "vq:window=2,num_codes=4"
LENGTH = 9
prompts = functools.partial(cases.prompts, length=LENGTH)


def make_task(name, attention, layers=None, **options):
    task_class = TASKS[name]
    backbone = families.make(name, **options)
    # Greedy choices that are far from ties.
    for weight in backbone.weights:
        if weight.path.startswith("token_embedding"):
            weight.assign(3.0 * weight)
    converted = convert_backbone(backbone, attention, layers)
    task = task_class(backbone=converted, preprocessor=None)
    task.compile(sampler="greedy")
    return task


TASKS = {
    "gpt2": models.GPT2CausalLM,
    "opt": models.OPTCausalLM,
    "llama": models.LlamaCausalLM,
    "mistral": models.MistralCausalLM,
    "qwen": models.QwenCausalLM,
    "gemma": models.GemmaCausalLM,
    "gemma3": models.Gemma3CausalLM,
    "qwen3": models.Qwen3CausalLM,
    "phi3": models.Phi3CausalLM,
    "mixtral": models.MixtralCausalLM,
}


SEQ2SEQ_TASKS = {"bart": models.BartSeq2SeqLM, "t5": models.T5Seq2SeqLM}


def generate(task, data, prefix=""):
    if isinstance(task, models.Gemma3CausalLM):
        # Without images, `generate` of KerasHub 0.32 fails to join them.
        inputs = {name: ops.convert_to_tensor(array) for name, array in data.items()}
        inputs["padding_mask"] = ops.cast(inputs["padding_mask"], "bool")
        made = task.generate_step(inputs, stop_token_ids=None)
    else:
        made = task.generate(dict(data), stop_token_ids=None)
    return ops.convert_to_numpy(made[f"{prefix}token_ids"])


@pytest.mark.parametrize(
    ("name", "attention", "layers"),
    [
        ("gpt2", PERFORMER, None),
        ("gpt2", VQ, [1]),
        ("opt", "local:window=2", [0]),
        ("llama", PERFORMER, [1]),
        ("llama", VQ, None),
        ("mistral", "local:window=2", [0]),
        ("qwen", "performer:num_features=4,window=2", [0]),
        ("gemma", VQ, [1]),
        ("gemma3", PERFORMER, None),
        ("gemma3", "local:window=2", [0]),
        ("qwen3", "performer:num_features=4,window=2", [0]),
        ("phi3", PERFORMER, None),
        ("mixtral", "local:window=2", [0]),
        ("gpt2", "xl:same_length=True,memory_length=3", [1]),
    ],
)
def test_tokens_are_those_of_whole_calls(name, attention, layers):
    task = make_task(name, attention, layers)
    # Padding on the right of two prompts, on both sides of another.
    data = prompts([2, 5, 3], starts=[0, 0, 2])
    families.assert_greedy(task, data, generate(task, data))


def test_a_pattern_mixes_states_with_keys_and_values():
    pattern = {"local:window=2": 2, "full": 1}
    task = make_task("gpt2", pattern, num_layers=4)
    assert task.backbone.attention_layers == [0, 1, 3]
    data = prompts([2, 5, 3], starts=[0, 0, 2])
    families.assert_greedy(task, data, generate(task, data))


@pytest.mark.parametrize(
    ("name", "attention", "layers"),
    [
        ("bart", PERFORMER, None),
        ("bart", PERFORMER, [0, 3]),
        ("t5", "performer:num_features=4,window=2", None),
        ("t5", VQ, [2, 3]),
        ("t5", "local:window=2", [0, 1]),
    ],
)
def test_a_decoder_with_an_encoder(name, attention, layers):
    converted = convert_backbone(families.make(name), attention, layers)
    task = SEQ2SEQ_TASKS[name](converted)
    task.compile(sampler="greedy")
    data = families.inputs(converted)
    decoder = prompts([2, 3], starts=[0, 1], length=7)
    data |= {f"decoder_{name}": array for name, array in decoder.items()}
    families.assert_greedy(task, data, generate(task, data, "decoder_"), "decoder_")


def test_prompts_are_read_in_segments():
    task = make_task("gpt2", VQ, [0], num_layers=2, max_sequence_length=150)
    # Segments of 128 and 16 tokens, of which some exist in one row only.
    data = prompts([141, 3], length=146)
    lengths = []

    layer = task.backbone.attention_sites[0].layer
    stream = layer.stream

    def record_length(x, *arguments):
        lengths.append(x.shape[1])
        return stream(x, *arguments)

    layer.stream = record_length
    families.assert_greedy(task, data, generate(task, data))
    # A backend that compiles runs each length once.
    assert lengths[:2] == [128, 16]
    assert set(lengths[2:]) == {1}


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_rows_are_as_long_as_max_length_says(name):
    task = make_task(name, "local:window=2", [0])
    data = prompts([LENGTH, 1], starts=[0, 4])
    tokens = generate(task, data)
    np.testing.assert_array_equal(tokens[0], data["token_ids"][0])
    data = {name: array[1:] for name, array in data.items()}
    families.assert_greedy(task, data, tokens[1:])


def test_stop_tokens_end_each_row_by_itself():
    task = make_task("llama", PERFORMER, [1])
    data = prompts([2, 6, 3])
    free = generate(task, data)
    stop = int(free[0, 4])
    made = task.generate(dict(data), stop_token_ids=[stop])
    tokens, mask = (ops.convert_to_numpy(made[name]) for name in data)
    for row, length in enumerate([2, 6, 3]):
        ends = np.flatnonzero(free[row, length:] == stop)
        end = length + ends[0] + 1 if len(ends) else LENGTH
        np.testing.assert_array_equal(tokens[row, :end], free[row, :end])
        np.testing.assert_array_equal(mask[row], np.arange(LENGTH) < end)


@pytest.mark.parametrize("sampler", ["beam", "contrastive", "top_k"])
def test_samplers_that_reorder_the_cache(sampler):
    samplers = {
        # With one beam or candidate, they are greedy.
        "beam": keras_hub.samplers.BeamSampler(num_beams=1),
        "contrastive": keras_hub.samplers.ContrastiveSampler(k=1, alpha=0.1),
        "top_k": keras_hub.samplers.TopKSampler(k=1),
    }
    task = make_task("gpt2", VQ, [1], num_layers=2)
    task.compile(sampler=samplers[sampler])
    data = prompts([3, 4])
    families.assert_greedy(task, data, generate(task, data))


def test_beams_give_the_likeliest_tokens():
    task = make_task("gpt2", PERFORMER, [0], num_layers=2, vocabulary_size=6)
    data = prompts([2, 2], length=4)
    data["token_ids"] %= 6
    task.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=6))
    made = generate(task, data)
    # With as many beams as tokens, two steps try all pairs.
    likeliest = [(-np.inf, None), (-np.inf, None)]
    for pair in np.ndindex(6, 6):
        tokens = data["token_ids"].copy()
        tokens[:, 2:] = pair
        inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
        logits = ops.convert_to_numpy(ops.log_softmax(task(inputs), axis=-1))
        for row in range(2):
            found = logits[row, 1, pair[0]] + logits[row, 2, pair[1]]
            likeliest[row] = max(likeliest[row], (found, pair))
    np.testing.assert_array_equal(made[:, 2:], [pair for _, pair in likeliest])


def test_mixed_precision_keeps_states_wide():
    task = make_task("gpt2", PERFORMER, [1], num_layers=2, dtype="mixed_bfloat16")
    data = prompts([3, 3])
    assert generate(task, data).shape == (2, LENGTH)
    cache = CausalMethods(task, data).initial_cache()
    softmax, state = cache["layers"]
    assert keras.backend.standardize_dtype(softmax.dtype) == "bfloat16"
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in state.values()}
    assert dtypes <= {"float32", "int32"}


def test_a_loaded_task_generates_the_same(tmp_path):
    task = make_task("llama", VQ, [0])
    data = prompts([3, 2])
    expected = generate(task, data)
    task.save_to_preset(str(tmp_path))
    loaded = models.CausalLM.from_preset(str(tmp_path))
    assert type(loaded) is models.LlamaCausalLM
    loaded.compile(sampler="greedy")
    np.testing.assert_array_equal(generate(loaded, data), expected)


@pytest.mark.any_backend
def test_the_cache_has_one_size_at_every_length():
    shapes = []
    for length in (9, 16):
        task = make_task("gpt2", VQ, num_layers=1)
        methods = CausalMethods(task, prompts([3, 2], length=length))
        shapes.append(
            [tuple(x.shape) for x in keras.tree.flatten(methods.initial_cache())]
        )
    assert shapes[0] == shapes[1]


def test_other_backbones_generate_as_before():
    convert_backbone(families.make("gpt2", num_layers=1), PERFORMER)
    task = models.GPT2CausalLM(families.make("gpt2", num_layers=1))
    task.compile(sampler="greedy")
    data = prompts([3, 2])
    families.assert_greedy(task, data, generate(task, data))


@pytest.mark.any_backend
def test_what_others_wrapped_stays_wrapped():
    called = []

    def stock(self, inputs, stop_token_ids=None):
        called.append("stock")
        return inputs

    @functools.wraps(stock)
    def call_stock(*args):
        called.append("wrapper")
        return stock(*args)

    def run(task, generate_step, inputs, stop_token_ids):
        called.append("run")
        return generate_step(task, inputs, stop_token_ids)

    task_class = type("Task", (), {"generate_step": call_stock})
    wrap_generate_step(task_class, run)
    assert task_class().generate_step(3) == 3
    assert called == ["run", "wrapper", "stock"]


@pytest.mark.any_backend
def test_a_cache_of_keys_and_values_is_refused():
    task = make_task("gpt2", PERFORMER, num_layers=1)
    with pytest.raises(ValueError, match="instead of a cache of keys and values"):
        task._build_cache(ops.ones((1, 4), "int32"))
