"""Generation with the layers' states equals calls on the whole sequence."""

import functools

import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import (
    EfficientByteTokenizer,
    EfficientCausalLM,
    EfficientCausalLMPreprocessor,
)
from keras_efficient_attn.models.tasks import prompts as prompts_module
from tests.autodiff import compile_step, to_numpy
from tests.models import cases
from tests.models.cases import DECODERS, inputs, make_backbone
from tests.ops.pieces import read_in_pieces

LENGTH = 16
prompts = functools.partial(cases.prompts, length=LENGTH)
samplers = keras_hub.samplers


@pytest.fixture(autouse=True)
def short_prompt_chunks(monkeypatch):
    """Makes a test's prompt have segments and a remainder."""
    monkeypatch.setattr(prompts_module, "SEGMENT_LENGTHS", (6, 3))


def whole_sequence_calls(model, sampler, data):
    """The tokens of KerasHub's sampler from calls on the whole sequence."""
    backbone = compile_step(lambda inputs: model.backbone(inputs))

    def next_token(prompt, cache, index):
        hidden = backbone({"token_ids": prompt, "padding_mask": ops.ones_like(prompt)})
        logits = model.backbone.token_embedding(hidden, reverse=True)
        return take(logits, index - 1), take(hidden, index - 1), cache

    def take(x, index):
        shape = (x.shape[0], 1, x.shape[2])
        return ops.squeeze(ops.slice(x, (0, index, 0), shape), axis=1)

    mask = np.ones_like(data["padding_mask"])
    hidden = backbone({"token_ids": data["token_ids"], "padding_mask": mask})
    return to_numpy(
        sampler(
            next=next_token,
            prompt=ops.convert_to_tensor(data["token_ids"]),
            cache=(),
            index=int(data["padding_mask"].sum(1).min()),
            mask=ops.cast(data["padding_mask"], "bool"),
            hidden_states=hidden,
            model=model,
        )
    )


def make_model(name, **options):
    """Untied, because tied embeddings would always repeat the last token."""
    backbone = make_backbone(name, **{"embedding": "untied", **options})
    return EfficientCausalLM(backbone)


def generate(model, data, **kwargs):
    data = {name: value.copy() for name, value in data.items()}
    return model.generate(data, **{"stop_token_ids": None, **kwargs})


def step_by_step(model, sampler, data):
    """The tokens that a sampler chooses from calls on the whole sequence.

    Each step gives every row its next token.
    """
    tokens, mask = data["token_ids"].copy(), data["padding_mask"]
    call = compile_step(lambda inputs: model(inputs))
    rows, (_, length) = np.arange(len(tokens)), tokens.shape
    lengths = np.maximum(mask.sum(1), 1)
    for step in range(length - lengths.min()):
        whole = {"token_ids": tokens, "padding_mask": np.ones_like(mask)}
        place = np.minimum(lengths + step, length - 1)
        logits = to_numpy(call(whole))[rows, place - 1]
        probabilities = sampler.compute_probabilities(ops.convert_to_tensor(logits))
        taken = to_numpy(sampler.get_next_token(probabilities))
        unfinished = lengths + step < length
        tokens[rows[unfinished], place[unfinished]] = taken[unfinished]
    return tokens


def greedy(model, data):
    return step_by_step(model, samplers.GreedySampler(), data)


def test_segments_give_what_the_whole_sequence_gives():
    backbone, data = make_backbone("bytes"), inputs("bytes")
    data["padding_mask"] = np.ones_like(data["padding_mask"])
    tokens = data["token_ids"]
    expected = to_numpy(backbone(data))
    state = backbone.get_initial_state(2, tokens.shape[1])
    received, _ = read_in_pieces(backbone.stream, state, [tokens], (5, 1, 7))
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "make_sampler", "lengths"),
    [
        # The last prompt is complete, an empty one starts from padding.
        ("defaults", samplers.GreedySampler, (9, 6, LENGTH)),
        ("bytes", lambda: samplers.RandomSampler(seed=1), (9, 0, LENGTH)),
        ("mixed-rotary", lambda: samplers.TopKSampler(k=9, seed=1), (7, 12, 8)),
        ("recurrent", lambda: samplers.TopPSampler(p=0.9, seed=1), (8, 8)),
        ("softmax", lambda: samplers.RandomSampler(seed=1), (1, 5)),
        ("reversible", samplers.GreedySampler, (9, 6)),
        ("two-residuals", samplers.GreedySampler, (9, 6)),
        ("two-streams", samplers.GreedySampler, (9, 6)),
        ("universal", samplers.GreedySampler, (9, 6)),
    ],
    ids=DECODERS,
)
def test_generation_equals_calls_on_the_whole_sequence(name, make_sampler, lengths):
    model, data = make_model(name), prompts(lengths)
    model.compile(sampler=make_sampler())
    expected = step_by_step(model, make_sampler(), data)
    received = generate(model, data)
    np.testing.assert_array_equal(received["token_ids"], expected)
    assert received["padding_mask"].all()


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: samplers.BeamSampler(num_beams=3),
        lambda: samplers.ContrastiveSampler(k=3),
    ],
    ids=["beam", "contrastive"],
)
def test_searches_equal_those_with_calls_on_the_whole_sequence(make_sampler):
    model, data = make_model("bytes"), prompts((7, 12))
    model.compile(sampler=make_sampler())
    received = generate(model, data)
    for row in range(2):
        alone = {name: array[row : row + 1] for name, array in data.items()}
        expected = whole_sequence_calls(model, make_sampler(), alone)
        np.testing.assert_array_equal(received["token_ids"][row], expected[0])


@pytest.mark.parametrize("name", ["bytes", "mixed-rotary", "softmax", "universal"])
def test_prompts_are_padded_anywhere(name):
    model, data = make_model(name), prompts((9, 6, 1))
    model.compile(sampler="greedy")
    expected = generate(model, data)["token_ids"]
    random = np.random.default_rng(2)
    order = np.stack([random.permutation(LENGTH) for _ in range(3)])
    order[0] = np.roll(np.arange(LENGTH), 4)
    for row, length in enumerate((9, 6, 1)):
        # What exists keeps its order.
        order[row, order[row] < length] = np.arange(length)
    moved = {name: np.take_along_axis(x, order, axis=1) for name, x in data.items()}
    received = generate(model, moved)
    np.testing.assert_array_equal(received["token_ids"], expected)
    assert received["padding_mask"].all()


def test_max_length_needs_no_preprocessor():
    model, data = make_model("softmax"), prompts((5, 3))
    model.compile(sampler="greedy")
    expected = generate(model, data)["token_ids"]
    for length in (7, LENGTH):
        received = generate(model, data, max_length=length)["token_ids"]
        np.testing.assert_array_equal(received, expected[:, :length])
    short = {name: array[:, ::-1][:, -5:] for name, array in prompts((5, 3)).items()}
    with pytest.raises(ValueError, match="must fit into `max_length`.*5.*max_length=4"):
        generate(model, short, max_length=4)


def test_xla_gives_the_same(backend):
    if backend != "tensorflow":
        pytest.skip("JAX compiles in any case, and KerasHub not on PyTorch")
    model, data = make_model("mixed-rotary"), prompts((9, 6))
    model.compile(sampler="greedy", jit_compile=True)
    np.testing.assert_array_equal(
        generate(model, data)["token_ids"], greedy(model, data)
    )


def test_generation_ends_at_stop_tokens():
    model, data = make_model("defaults"), prompts((9, 6))
    model.compile(sampler="greedy")
    free = greedy(model, data)
    # Each row's third new token.
    stops = tuple(int(free[row, start + 2]) for row, start in enumerate((9, 6)))
    received = generate(model, data, stop_token_ids=stops)
    for row, start in enumerate((9, 6)):
        new = free[row, start:]
        count = start + 1 + int(np.isin(new, stops).argmax())
        np.testing.assert_array_equal(
            received["token_ids"][row, :count], free[row, :count]
        )
        mask = received["padding_mask"][row].astype(bool)
        np.testing.assert_array_equal(mask, np.arange(LENGTH) < count)


def test_patterns_generate_from_their_caches():
    attention = [
        "sparse:stride=3",
        "sparse:pattern=fixed,stride=4,summary=2",
        "local:query_block=(2,2),memory=(1,1),grid=(5,4),grid_order=block",
    ]
    model, data = (
        make_model("defaults", num_layers=3, attention=attention),
        prompts((6, 4)),
    )
    model.compile(sampler=samplers.GreedySampler())
    expected = greedy(model, data)
    np.testing.assert_array_equal(generate(model, data)["token_ids"], expected)


@pytest.mark.any_backend
def test_the_state_grows_for_softmax_alone():
    def size(name, length):
        state = make_backbone(name).get_initial_state(1, length)
        sizes = []
        collect(state, sizes)
        return sum(sizes)

    def collect(nest, sizes):
        for value in nest.values():
            if isinstance(value, dict):
                collect(value, sizes)
            else:
                assert value.shape[0] == 1
                sizes.append(int(np.prod(value.shape)))

    assert size("bytes", 10) == size("bytes", 1000)
    assert size("softmax", 1000) > 50 * size("softmax", 10)


def test_text_goes_in_and_text_comes_out():
    preprocessor = EfficientCausalLMPreprocessor(
        EfficientByteTokenizer(), sequence_length=24
    )
    model = EfficientCausalLM(make_backbone("bytes", vocabulary_size=256), preprocessor)
    model.compile(sampler="greedy")
    texts = ["def ", "naïve Æ"]
    whole = model.generate(texts, max_length=20)
    new = model.generate(texts, max_length=20, strip_prompt=True)
    assert whole == [text + more for text, more in zip(texts, new, strict=True)]
    assert all(new)


@pytest.mark.any_backend
def test_the_tokenizer_keeps_its_special_bytes_apart():
    tokenizer = EfficientByteTokenizer()
    text = "AÆ€𝄞\U0010ffff"
    tokens = [int(token) for token in tokenizer(text)]
    assert tokens == list(text.encode())
    assert not set(tokens) & set(tokenizer.special_token_ids)
    assert tokenizer.detokenize(tokens) == text


def test_texts_with_padding_bytes_are_refused():
    tokenizer = EfficientByteTokenizer()
    for text in ("a\0b", ["ab", "\0"], b"a\0", np.array(["a\0b"], object)):
        with pytest.raises(ValueError, match=r"must not have NUL.*Received: .*x00"):
            tokenizer(text)
    preprocessor = EfficientCausalLMPreprocessor(tokenizer, sequence_length=8)
    model = EfficientCausalLM(make_backbone("defaults"), preprocessor)
    with pytest.raises(ValueError, match="must not have NUL"):
        model.generate(["a\0b"])


def test_no_prompts_give_no_texts():
    model = EfficientCausalLM(
        make_backbone("defaults"),
        EfficientCausalLMPreprocessor(EfficientByteTokenizer(), sequence_length=8),
    )
    assert model.generate([]) == model.generate(()) == []


@pytest.mark.any_backend
def test_what_cannot_generate_says_so():
    with pytest.raises(ValueError, match="architecture='decoder'"):
        EfficientCausalLM(make_backbone("encoder"))
    model = make_model("recurrent")
    with pytest.raises(ValueError, match="32"):
        generate(model, prompts((4,), length=33))
    with pytest.raises(ValueError, match="decoder"):
        make_backbone("encoder").get_initial_state(1, 5)


def test_the_cache_follows_keras_hubs_signature():
    model, tokens = make_model("bytes"), prompts((LENGTH,))["token_ids"]
    expected = to_numpy(model({"token_ids": tokens, "padding_mask": tokens * 0 + 1}))
    cache, received = model.get_initial_cache(1, LENGTH), []
    for start, end in ((0, 5), (5, 6), (6, LENGTH)):
        logits, hidden, cache = model.call_with_cache(
            tokens[:, start:end], cache, start
        )
        assert tuple(hidden.shape)[:2] == (1, end - start)
        received.append(to_numpy(logits))
    received = np.concatenate(received, axis=1)
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4)
    # Only the state's current position can be read.
    wrong, _, _ = model.call_with_cache(tokens[:, :1], cache, 3)
    assert np.isnan(to_numpy(wrong)).all()


@pytest.mark.parametrize("name", ["defaults", "recurrent"])
def test_scores_are_the_logits_and_their_loss(name):
    model, data = make_model(name), prompts((LENGTH, 7))
    expected = to_numpy(model(data))
    np.testing.assert_array_equal(to_numpy(model.score(**data)), expected)
    seen = []

    def intercept(x, i):
        seen.append(i)
        return x

    received = model.score(**data, layer_intercept_fn=intercept)
    np.testing.assert_allclose(to_numpy(received), expected, atol=1e-5)
    backbone = model.backbone.decoder
    blocks = len(backbone.blocks) * backbone.num_recurrences
    assert seen == list(range(-1, blocks))
    doubled = model.score(**data, layer_intercept_fn=lambda x, i: x * 2 if i < 0 else x)
    assert np.abs(to_numpy(doubled) - expected).max() > 1e-3

    targets = np.roll(data["token_ids"], -1, axis=1)
    loss = model.score(**data, scoring_mode="loss", target_ids=targets)
    shifted = expected - expected.max(-1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    log = np.take_along_axis(log, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(to_numpy(loss), -log, rtol=1e-4, atol=1e-5)


@pytest.mark.any_backend
def test_scores_that_cannot_be():
    model, data = make_model("defaults"), prompts((5,))
    with pytest.raises(ValueError, match="scoring_mode='bits'"):
        model.score(**data, scoring_mode="bits")
    with pytest.raises(ValueError, match="target_ids=None"):
        model.score(**data, scoring_mode="loss")
    reversible = make_model("defaults", residual="reversible")
    with pytest.raises(ValueError, match="layer_intercept_fn="):
        reversible.score(**data, layer_intercept_fn=lambda x, i: x)
