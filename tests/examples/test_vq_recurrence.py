"""Training over segments: the segments, and a tiny run."""

import itertools
import math

import keras
import numpy as np
import pytest

import vq_recurrence
from keras_efficient_attn.models import Segments, TransformerXL
from tests.autodiff import to_numpy
from truncation import training

pytestmark = pytest.mark.any_backend

SMALL = (
    "--segment 8 --document 4 --window 3 --codes 4 --units 1 --dim 6 --key-dim 4 "
    "--batch 2 --steps 3 --verbose 0"
)


def first_configuration(options):
    arguments = vq_recurrence.parse_arguments(options.split())
    return vq_recurrence.configurations(arguments)[0]


def streamed(kept):
    """The losses and weights of segments, of a model that keeps this."""
    keras.utils.set_random_seed(0)
    model = training.build_model(first_configuration(SMALL))
    model.backbone.kept = kept
    text = np.random.default_rng(0).integers(0, 256, 33)
    return training.tested_losses(TransformerXL(model, 1), Segments([text], 1, 8))


def test_what_is_kept_of_a_state():
    losses = {kept: streamed(kept)[0] for kept in training.KEPT}
    for one, other in itertools.combinations(losses.values(), 2):
        # Segments differ in what came before them, the first in nothing.
        assert one[0] == pytest.approx(other[0])
        assert np.abs(one[1:] - other[1:]).max() > 1e-4


def test_an_empty_state_is_that_of_a_new_document():
    arguments = first_configuration(SMALL)
    model = training.build_model(arguments)
    model.backbone.kept = training.NOTHING
    text = np.random.default_rng(0).integers(0, 256, 17)
    losses, _ = training.tested_losses(TransformerXL(model, 1), Segments([text], 1, 8))
    second = Segments([text[8:]], 1, 8)
    alone, _ = training.tested_losses(TransformerXL(model, 1), second)
    np.testing.assert_allclose(losses[1:], alone, rtol=1e-5)


def test_one_argument_differs_at_a_time():
    options = [*SMALL.split(), "--codes", "4", "8", "--window", "3", "2", "5"]
    arguments = vq_recurrence.parse_arguments([*options, "--no-gradient"])
    found = vq_recurrence.configurations(arguments)
    assert [(each.codes, each.window, each.gradient) for each in found] == [
        (4, 3, True),
        (8, 3, True),
        (4, 2, True),
        (4, 5, True),
        (4, 3, False),
    ]
    layer = training.build_model(found[-1]).backbone.decoder.blocks[0].attention
    assert not layer.config.gradient_through_cache
    assert (layer.num_codes, layer.window) == (4, 3)


def test_parts_of_a_training(monkeypatch):
    """The parts divide the documents, and keep what they say."""
    arguments = first_configuration(SMALL)
    model, seen = training.build_model(arguments), []

    def fit(self, data, **options):
        kept = self.language_model.backbone.kept
        seen.append((kept, [int(data[4 * i][0]["token_ids"][0, 0]) for i in range(2)]))

    monkeypatch.setattr(TransformerXL, "fit", fit)
    texts = [np.full(33, i) for i in range(8)]
    training.train(model, training.TRAINED["cache-later"], texts, arguments)
    assert seen == [("nothing", [0, 2]), ("cache", [4, 6])]


def test_losses_are_those_of_the_whole_text():
    model = training.build_model(first_configuration(SMALL))
    text = np.random.default_rng(0).integers(0, 256, 2 * 24 + 1)
    losses, weights = training.tested_losses(
        TransformerXL(model, 2), Segments(text, 2, 8)
    )
    rows = np.stack([text[:25], text[24:49]])
    inputs = {"token_ids": rows[:, :-1], "padding_mask": np.ones((2, 24))}
    logits = to_numpy(model(inputs)).astype("float64")
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    right = -np.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(losses, right.reshape(2, 3, 8).sum((0, 2)), rtol=1e-4)
    np.testing.assert_array_equal(weights, [16, 16, 16])


def test_a_tiny_run(tmp_path, printed_table):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 40)
    options = ["--trained", "nothing", "cache-later", "--codes", "4", "2"]
    assert vq_recurrence.main([*SMALL.split(), *options, "--text", str(path)]) == 0
    header, *rows = printed_table()
    assert header[-4:-1] == [f"tested with {kept}" for kept in training.KEPT]
    assert [row[:4] for row in rows] == [
        [codes, "3", "yes", trained]
        for codes in ("4", "2")
        for trained in ("nothing", "cache-later")
    ]
    # Random weights guess one of 256 bytes.
    cells = [float(cell) for row in rows for cell in row[4:-1]]
    assert all(abs(cell - math.log2(256)) < 1 for cell in cells)
    for nothing, later in (rows[:2], rows[2:]):
        difference = float(later[4]) - float(nothing[4])
        assert float(later[-1]) == pytest.approx(difference, abs=2e-3)
        assert float(nothing[-1]) == 0


def test_the_ways_to_train_are_those_of_the_script():
    assert tuple(training.TRAINED) == vq_recurrence.TRAINED


def test_the_cache_remembers_what_the_segment_does_not_show(backend):
    """Each document says 0 and its own byte, one of two, in turns.

    A segment of 2 begins with 0: only a model with a cache can know what follows.
    """
    random = np.random.default_rng(0)

    def documents(count):
        rows = np.zeros((count, 17), "int32")
        rows[:, 1::2] = random.integers(1, 3, (count, 1))
        return list(rows)

    arguments = first_configuration(
        "--segment 2 --window 2 --codes 8 --units 1 --dim 16 --key-dim 8"
    )
    # Seeds of each backend with which codes learn it in one epoch.
    seed = 4 if backend == "jax" else 0
    losses = {}
    for kept in (training.CACHE, training.NOTHING):
        keras.utils.set_random_seed(seed)
        model = TransformerXL(training.build_model(arguments), 32)
        model.language_model.backbone.kept = kept
        model.compile(
            keras.optimizers.Adam(2e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(Segments(documents(320), 32, 2), verbose=0)
        loss, weight = training.tested_losses(model, Segments(documents(64), 32, 2))
        # The first segment of a document tells its byte to nobody.
        later = np.arange(len(loss)) % 8 > 0
        losses[kept] = loss[later].sum() / weight[later].sum()
    # One position in two is one of two bytes.
    assert losses[training.NOTHING] > 0.95 * math.log(2) / 2
    assert losses[training.CACHE] < 0.5 * math.log(2) / 2


def test_too_little_text_is_refused(tmp_path, error_line):
    path = tmp_path / "text"
    path.write_bytes(b"abc" * 30)
    arguments = [*SMALL.split(), "--text", str(path)]
    assert "--document 4" in error_line(vq_recurrence, arguments)
    path.write_bytes(bytes(range(256)) * 40)
    arguments += ["--test-bytes", "20"]
    assert "--test-bytes 20" in error_line(vq_recurrence, arguments)
