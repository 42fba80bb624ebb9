"""Encoder-decoder generation with states equals calls on whole sequences."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn.models import (
    EfficientByteTokenizer,
    EfficientSeq2SeqLM,
    EfficientSeq2SeqLMPreprocessor,
    PositionOptions,
    RecurrenceOptions,
    preset_names,
)
from keras_efficient_attn.models.tasks import streaming
from tests.autodiff import to_numpy
from tests.models.cases import ELU, make_backbone

LENGTH = 9
samplers = keras_hub.samplers
CASES = {
    "linear": {},
    "universal": dict(
        recurrence=RecurrenceOptions(2, "learned", {"halting_bias": -0.5}),
        positions=PositionOptions("sinusoidal", each_layer=True),
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
    monkeypatch.setattr(streaming, "PROMPT_SEGMENTS", (3, 1))


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


def assert_greedy(model, data, generated):
    """Each new token is the most likely in one call on the whole sequences."""
    tokens = generated["decoder_token_ids"]
    ones = np.ones_like(tokens)
    whole = data | {"decoder_token_ids": tokens, "decoder_padding_mask": ones}
    likeliest = to_numpy(model(whole)).argmax(-1)[:, :-1]
    prompt = data["decoder_padding_mask"][:, 1:] == 1
    expected = np.where(prompt, data["decoder_token_ids"][:, 1:], likeliest)
    np.testing.assert_array_equal(tokens[:, 1:], expected)
    np.testing.assert_array_equal(tokens[:, 0], data["decoder_token_ids"][:, 0])
    assert generated["decoder_padding_mask"].all()
    # They depend on the encoder's input.
    whole["encoder_token_ids"] = data["encoder_token_ids"][::-1].copy()
    assert (to_numpy(model(whole)).argmax(-1)[:, :-1] != likeliest).any()


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
    text_model.save(tmp_path / "task.keras")
    for again in (
        EfficientSeq2SeqLM.from_preset(tmp_path / "preset"),
        keras.saving.load_model(tmp_path / "task.keras"),
    ):
        assert type(again) is EfficientSeq2SeqLM
        assert type(again.preprocessor) is EfficientSeq2SeqLMPreprocessor
        assert again.preprocessor.encoder_sequence_length == 7
        np.testing.assert_allclose(
            to_numpy(again(data)), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.any_backend
def test_configurations_with_encoder_and_decoder_make_tasks():
    names = [
        "adaptive_universal_transformer_base",
        "reformer_wmt_base",
        "transformer_base",
        "universal_transformer_base",
    ]
    assert set(names) < set(preset_names())
    sizes = dict(num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=4)
    for name in names:
        task = EfficientSeq2SeqLM.from_preset(
            name, load_weights=False, preprocessor=None, vocabulary_size=50, **sizes
        )
        assert tuple(task(pairs()).shape) == (2, LENGTH, 50)


def test_what_cannot_generate_says_so():
    with pytest.raises(ValueError, match="architecture='decoder'"):
        EfficientSeq2SeqLM(make_backbone("defaults"))
    with pytest.raises(ValueError, match="load_weights=False"):
        EfficientSeq2SeqLM.from_preset("transformer_base", preprocessor=None)
    learned = PositionOptions("learned", max_length=LENGTH - 1)
    model = make_model(positions=learned)
    with pytest.raises(ValueError, match=f"max_length={LENGTH}"):
        model.generate(pairs(), stop_token_ids=None)
