"""Words: the format, the vocabulary, the windows, the tied loss, and a tiny run."""

from types import SimpleNamespace

import numpy as np
import pytest

import word_lm
from tests.autodiff import to_numpy
from words import data

pytestmark = pytest.mark.any_backend

SMALL = (
    "--length 8 --stride 3 --chunk 4 --dim 8 --heads 2 --layers 1 --steps 90 --batch 4 "
    "--least 2 --learning-rate 0.05 --dropout 0 --verbose 0"
)


@pytest.fixture
def files(tmp_path):
    """A text in which each word says the next, in the format of WikiText."""
    paths = [tmp_path / name for name in ("train", "valid", "test")]
    paths[0].write_text(" a b c d \n\n" * 60 + " rare \n", encoding="utf-8")
    for path in paths[1:]:
        path.write_text(" a b c d \n\n" * 20, encoding="utf-8")
    return paths


def test_words_and_vocabulary(files):
    assert data.spaced_words(" a b , \n\n c\n") == [
        *("a", "b", ",", "<eos>"),
        *("<eos>", "c", "<eos>"),
    ]
    assert data.source_words("x_1 = f(2)\n") == [*"x_1 = f ( 2 )".split(), "<eos>"]
    words = data.load_words(files)
    vocabulary = data.make_vocabulary(words["train"], 2)
    # By frequency: two line ends for each of the others; what is rare is unknown.
    assert list(vocabulary) == ["<eos>", "a", "b", "c", "d", "<unk>"]
    tokens = data.encode(["d", "rare", "never", "<eos>"], vocabulary)
    assert tokens.tolist() == [4, 5, 5, 0]
    # WikiText has the unknown word itself.
    known = data.make_vocabulary(["<unk>", "<unk>", "a", "a", "a"], 1)
    assert known == {"a": 0, "<unk>": 1}


@pytest.mark.parametrize(("count", "stride"), [(20, 3), (23, 7), (10, 1), (9, 4)])
def test_windows_score_every_word_but_the_first_once(count, stride):
    length = 8
    rows, weights = data.sliding_windows(np.arange(count), length, stride)
    scored = rows[:, 1:][weights == 1]
    assert sorted(scored) == list(range(1, count))
    before = np.tile(np.arange(length), (len(rows), 1))[1:][weights[1:] == 1]
    assert before.size == 0 or before.min() >= length - stride


def model_of(vocabulary_size=11, **options):
    from words.model import build_model

    arguments = word_lm.parse_arguments(SMALL.split())
    arguments = SimpleNamespace(**{**vars(arguments), **options})
    return build_model("softmax", vocabulary_size, arguments)


def test_losses_and_perplexity_are_those_of_all_logits():
    from words.model import perplexity

    model = model_of(chunk=3)
    tokens = np.random.default_rng(0).integers(0, 11, 30).astype("int32")
    rows, weights = data.sliding_windows(tokens, 8, 3)
    hidden = model.backbone(
        {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}
    )
    embeddings = to_numpy(model.backbone.token_embedding.embeddings)
    logits = to_numpy(hidden).astype("float64") @ embeddings.astype("float64").T
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log, rows[:, 1:, None], -1)[..., 0]
    losses = to_numpy(model(data.loss_inputs(rows)))
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    mean = (expected * weights).sum() / (len(tokens) - 1)
    np.testing.assert_allclose(perplexity(model, tokens, 8, 3, 2), np.exp(mean), 1e-4)
    # The projection is the embedding: there is no other weight of that size.
    large = [w for w in model.weights if 11 in w.shape]
    assert [tuple(w.shape) for w in large] == [(11, 8)]


def test_heads_that_repeat_each_other_have_no_distance():
    from words.model import mean_head_distances

    model = model_of()
    rows = np.random.default_rng(0).integers(0, 11, (2, 8)).astype("int32")
    mean, variance = mean_head_distances(model, rows)
    assert mean > 1e-3 and variance > 0
    attention = model.backbone.transformer_layers[0].attention
    for dense in (attention.query_dense, attention.key_dense):
        for weight in dense.trainable_weights:
            value = to_numpy(weight).copy()
            value[..., 1, :] = value[..., 0, :]
            weight.assign(value)
    assert max(mean_head_distances(model, rows)) < 1e-6


def test_it_learns_and_compares(files, printed_table, capsys):
    arguments = [*SMALL.split(), "--text", *map(str, files)]
    assert word_lm.main(arguments) == 0
    printed = capsys.readouterr().out
    header, *rows = printed_table(printed)
    assert header[3:] == ["distance between heads", "its variance"]
    assert "6 words; 362 train, 120 validation, 120 test" in printed
    assert [row[0] for row in rows] == ["fourier", word_lm.PAPER, "softmax"]
    for row in rows:
        # Six words guessed at random have 6; those that the word before tells, 1.
        assert 1 <= float(row[1]) < 3 and 1 <= float(row[2]) < 3
        assert float(row[3]) > 0 and float(row[4]) >= 0


def test_what_is_refused(files, tmp_path, error_line):
    text = ["--text", *map(str, files)]
    assert "--stride 9" in error_line(word_lm, [*SMALL.split(), *text, "--stride", "9"])
    assert "120 words" in error_line(
        word_lm, [*SMALL.split(), *text, "--length", "120"]
    )
    assert "nothing" in error_line(
        word_lm, [*SMALL.split(), *text, "--attention", "nothing"]
    )
    text[-1] = str(tmp_path / "missing")
    assert "missing" in error_line(word_lm, [*SMALL.split(), *text])
