"""Encoder-decoder generation with states equals calls on whole sequences."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn.models import (
    EfficientByteTokenizer,
    EfficientSeq2SeqLM,
    EfficientSeq2SeqLMPreprocessor,
    FeedForwardOptions,
    PositionOptions,
    RecurrenceOptions,
    preset_names,
)
from keras_efficient_attn.models.tasks import prompts as prompts_module
from tests.autodiff import to_numpy
from tests.models.cases import ELU, make_backbone
from tests.saving import saved_and_loaded

LENGTH = 9
samplers = keras_hub.samplers
CASES = {
    "linear": {},
    "universal": dict(
        recurrence=RecurrenceOptions(2, "sinusoidal", {"halting_bias": -0.5}),
        positions=PositionOptions("sinusoidal", each_layer=True),
        feed_forward=FeedForwardOptions(separable_convolution=True),
    ),
    "reversible": dict(
        num_layers=2,
        attention=["softmax", ELU],
        cross_attention=ELU,
        residual="reversible",
    ),
}


@pytest.fixture(autouse=True)
def short_prompt_chunks(monkeypatch):
    """Makes a test's prompt have segments and a remainder."""
    monkeypatch.setattr(prompts_module, "SEGMENT_LENGTHS", (6, 3))


def make_model(name="linear", preprocessor=None, **options):
    """Untied, because tied embeddings would always repeat the last token."""
    options = {"embedding": "untied", **CASES[name], **options}
    return EfficientSeq2SeqLM(make_backbone("encoder-decoder", **options), preprocessor)


def pairs(sources=(7, 4), prompts=(5, 2)):
    """Inputs whose rows have tokens of these lengths, and padding."""
    random, data = np.random.default_rng(2), {}
    for side, lengths, width in (("encoder", sources, 7), ("decoder", prompts, LENGTH)):
        mask = (np.arange(width) < np.array(lengths)[:, None]).astype("int32")
        tokens = random.integers(1, 50, mask.shape).astype("int32")
        data |= {f"{side}_token_ids": tokens * mask, f"{side}_padding_mask": mask}
    return data


def assert_likeliest(model, data, generated):
    """Each new token is the likeliest of one call on the whole sequences.

    Returns:
        The logits of that call, and those of an encoder that reads other tokens.
    """
    tokens = generated["decoder_token_ids"]
    ones = np.ones_like(tokens)
    whole = data | {"decoder_token_ids": tokens, "decoder_padding_mask": ones}
    logits = to_numpy(model(whole))[:, :-1]
    prompt = data["decoder_padding_mask"][:, 1:] == 1
    expected = np.where(prompt, data["decoder_token_ids"][:, 1:], logits.argmax(-1))
    np.testing.assert_array_equal(tokens[:, 1:], expected)
    np.testing.assert_array_equal(tokens[:, 0], data["decoder_token_ids"][:, 0])
    assert generated["decoder_padding_mask"].all()
    whole["encoder_token_ids"] = data["encoder_token_ids"][::-1].copy()
    return logits, to_numpy(model(whole))[:, :-1]


def assert_greedy(model, data, generated):
    """As `assert_likeliest`, and they depend on what the encoder reads."""
    logits, others = assert_likeliest(model, data, generated)
    assert (others.argmax(-1) != logits.argmax(-1)).any()


@pytest.mark.parametrize(
    ("name", "make_sampler", "compiles"),
    [
        ("linear", samplers.GreedySampler, True),
        # With one beam or candidate, they are greedy.
        ("universal", lambda: samplers.BeamSampler(num_beams=1), False),
        ("reversible", lambda: samplers.ContrastiveSampler(k=1, alpha=0.1), False),
    ],
    ids=CASES,
)
def test_generated_tokens_are_those_of_whole_calls(name, make_sampler, compiles):
    model, data = make_model(name), pairs()
    model.compile(sampler=make_sampler(), run_eagerly=not compiles)
    generated = model.generate(dict(data), stop_token_ids=None)
    assert_greedy(model, data, generated)


@pytest.mark.parametrize("name", ["universal", "reversible"])
def test_streamed_logits_are_those_of_teacher_forcing(name):
    model, data = make_model(name), pairs(prompts=(LENGTH, LENGTH))
    expected = to_numpy(model(data))
    tokens = data["decoder_token_ids"]
    cache, received = (
        model.get_initial_cache(
            data["encoder_token_ids"], data["encoder_padding_mask"], LENGTH
        ),
        [],
    )
    for start, end in ((0, 5), (5, 6), (6, LENGTH)):
        logits, hidden, cache = model.call_with_cache(
            tokens[:, start:end], cache, start
        )
        assert tuple(hidden.shape) == (2, end - start, 8)
        received.append(to_numpy(logits))
    np.testing.assert_allclose(
        np.concatenate(received, axis=1), expected, rtol=1e-3, atol=1e-4
    )
    wrong, _, _ = model.call_with_cache(tokens[:, :1], cache, 3)
    assert np.isnan(to_numpy(wrong)).all()


@pytest.fixture(scope="module")
def text_model():
    preprocessor = EfficientSeq2SeqLMPreprocessor(
        EfficientByteTokenizer(), encoder_sequence_length=7, decoder_sequence_length=5
    )
    return make_model(preprocessor=preprocessor, vocabulary_size=256)


def test_text_goes_in_and_text_comes_out(text_model):
    texts = {"encoder_text": ["abc", "de"], "decoder_text": ["x", "yz"]}
    x, y, weights = (
        keras.tree.map_structure(to_numpy, part)
        for part in text_model.preprocessor(texts)
    )
    np.testing.assert_array_equal(
        x["encoder_token_ids"],
        [[253, *b"abc", 254, 0, 0], [253, *b"de", 254, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
        x["decoder_token_ids"], [[253, *b"x", 254, 0, 0], [253, *b"yz", 254, 0]]
    )
    np.testing.assert_array_equal(y, [[*b"x", 254, 0, 0, 0], [*b"yz", 254, 0, 0]])
    np.testing.assert_array_equal(weights, y > 0)

    logits = to_numpy(text_model(x)).astype("float64")
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log, y[..., None], axis=-1)[..., 0]
    text_model.compile(sampler="greedy", run_eagerly=True)
    # Keras' mean over all positions, including those without weight.
    loss = text_model.evaluate(texts, batch_size=2, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, (nats * weights).mean(), rtol=1e-4)
    whole = text_model.generate({"encoder_text": ["abc"], "decoder_text": ["x"]})
    assert whole[0].startswith("x")
    assert isinstance(text_model.generate("abc"), str)


def test_it_comes_back_from_preset_and_file(text_model, tmp_path):
    data = pairs()
    expected = to_numpy(text_model(data))
    text_model.save_to_preset(tmp_path / "preset")
    for again in (
        EfficientSeq2SeqLM.from_preset(tmp_path / "preset"),
        saved_and_loaded(text_model, tmp_path),
    ):
        assert type(again) is EfficientSeq2SeqLM
        assert type(again.preprocessor) is EfficientSeq2SeqLMPreprocessor
        assert again.preprocessor.encoder_sequence_length == 7
        np.testing.assert_allclose(
            to_numpy(again(data)), expected, rtol=1e-5, atol=1e-6
        )


SEQ_2_SEQ = (
    "adaptive_universal_transformer_base",
    "reformer_wmt_base",
    "transformer_base",
    "universal_transformer_base",
)


@pytest.mark.any_backend
def test_configurations_with_encoder_and_decoder_make_tasks():
    assert set(SEQ_2_SEQ) < set(preset_names())
    sizes = dict(num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=4)
    for name in SEQ_2_SEQ:
        task = EfficientSeq2SeqLM.from_preset(
            name, load_weights=False, preprocessor=None, vocabulary_size=50, **sizes
        )
        assert tuple(task(pairs()).shape) == (2, LENGTH, 50)


def randomise(model, seed):
    """Matrices for which one token is not the likeliest everywhere."""
    random = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        if len(weight.shape) > 1:
            weight.assign(random.normal(size=weight.shape))


@pytest.mark.parametrize("name", SEQ_2_SEQ)
def test_configurations_generate_what_whole_calls_give(name):
    keras.utils.set_random_seed(0)
    sizes = dict(num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12)
    model = EfficientSeq2SeqLM.from_preset(
        name,
        load_weights=False,
        preprocessor=None,
        vocabulary_size=50,
        embedding={"output": "untied", "scale": True},
        **sizes,
    )
    randomise(model, 0)
    data = pairs()
    model.compile(sampler="greedy", run_eagerly=True)
    generated = model.generate(dict(data), stop_token_ids=None)
    logits, others = assert_likeliest(model, data, generated)
    # Of some, the likeliest token is the same whatever the encoder reads.
    assert np.abs(logits - others).max() > 1e-2


def whole_log_probabilities(model, data, tokens):
    """Of each next token, by one call on the whole sequences, in float64."""
    whole = data | {
        "decoder_token_ids": tokens,
        "decoder_padding_mask": np.ones_like(tokens),
    }
    logits = to_numpy(model(whole)).astype("float64")
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def best_and_greedy(model, data):
    """The likeliest two tokens after five, of all pairs, and those of greedy search."""
    ends = np.array([(a, b) for a in range(6) for b in range(6)], "int32")
    prompt, best, greedy = data["decoder_token_ids"][:, :5], [], []
    for row in range(2):
        one = {
            name: np.repeat(x[row : row + 1], len(ends), 0) for name, x in data.items()
        }
        tokens = np.concatenate([np.repeat(prompt[row : row + 1], 36, 0), ends], 1)
        log = whole_log_probabilities(model, one, tokens)
        first, second = log[0, 4], log[np.arange(36), 5, ends[:, 1]]
        best.append(ends[(first[ends[:, 0]] + second).argmax()])
        after = second.reshape(6, 6)[first.argmax()]
        greedy.append((first.argmax(), after.argmax()))
    return np.array(best), np.array(greedy)


def test_beams_find_what_greedy_search_does_not():
    """As many beams as tokens make the search for two of them exhaustive."""
    model = make_model(vocabulary_size=6)
    data = {name: x[:, :7] % 6 for name, x in pairs((7, 7), (5, 5)).items()}
    for seed in range(50):
        randomise(model, seed)
        best, greedy = best_and_greedy(model, data)
        if (best != greedy).any():
            break
    for beams, expected in ((1, greedy), (6, best)):
        sampler = samplers.BeamSampler(num_beams=beams)
        model.compile(sampler=sampler, run_eagerly=True)
        generated = model.generate(dict(data), stop_token_ids=None)
        found = generated["decoder_token_ids"][:, 5:7]
        np.testing.assert_array_equal(found, expected)
    assert (best != greedy).any()


def test_texts_are_learned_by_fit():
    keras.utils.set_random_seed(0)
    preprocessor = EfficientSeq2SeqLMPreprocessor(
        EfficientByteTokenizer(), encoder_sequence_length=5, decoder_sequence_length=5
    )
    model = make_model(preprocessor=preprocessor, vocabulary_size=256)
    model.compile(keras.optimizers.Adam(0.05), sampler="greedy", run_eagerly=False)
    texts = {"encoder_text": ["ab", "cd"] * 8, "decoder_text": ["x", "yz"] * 8}
    model.fit(texts, batch_size=16, epochs=30, verbose=0)
    assert model.generate(["cd", "ab"]) == ["yz", "x"]


@pytest.mark.any_backend
def test_what_cannot_generate_says_so():
    with pytest.raises(ValueError, match="architecture='decoder'"):
        EfficientSeq2SeqLM(make_backbone("defaults"))
    with pytest.raises(ValueError, match="load_weights=False"):
        EfficientSeq2SeqLM.from_preset("transformer_base", preprocessor=None)
    learned = PositionOptions("learned", max_length=LENGTH - 1)
    model = make_model(positions=learned)
    with pytest.raises(ValueError, match=f"max_length={LENGTH}"):
        model.generate(pairs(), stop_token_ids=None)
    backbone = make_model().backbone
    state = backbone.get_initial_state(2)
    with pytest.raises(ValueError, match="memory"):
        backbone.stream(np.ones((2, 1), "int32"), state)
