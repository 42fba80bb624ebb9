"""Training over segments: the segments, and a tiny run."""

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


def test_forgotten_segments_all_begin_a_document():
    text = np.arange(41)
    usual, forgotten = (kind(text, 2, 5) for kind in (Segments, training.Forgotten))
    assert len(usual) == len(forgotten) == 4
    for index in range(4):
        inputs, *rest = forgotten[index]
        assert inputs["reset"].all()
        assert usual[index][0]["reset"].all() == (index == 0)
        for ours, theirs in zip(rest, usual[index][1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_losses_are_those_of_the_whole_text():
    arguments = vq_recurrence.parse_arguments(SMALL.split())
    model = training.build_model(arguments)
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
    assert vq_recurrence.main([*SMALL.split(), "--text", str(path)]) == 0
    header, first, second = printed_table()
    assert len(header) == 5
    for cells, name in ((first, "with its cache"), (second, "without")):
        assert cells[0] == name
        # Random weights guess one of 256 bytes.
        assert all(abs(float(cell) - math.log2(256)) < 1 for cell in cells[1:])


def test_the_cache_remembers_what_the_segment_does_not_show(backend):
    """Each document says 0 and its own byte, one of two, in turns.

    A segment of 2 begins with 0: only a model with a cache can know what follows.
    """
    random = np.random.default_rng(0)

    def documents(count):
        rows = np.zeros((count, 17), "int32")
        rows[:, 1::2] = random.integers(1, 3, (count, 1))
        return list(rows)

    options = "--segment 2 --window 2 --codes 8 --units 1 --dim 16 --key-dim 8".split()
    arguments = vq_recurrence.parse_arguments(options)
    # Seeds of each backend with which codes learn it in one epoch.
    seed = 4 if backend == "jax" else 0
    losses = {}
    for name, kind in (("with", Segments), ("without", training.Forgotten)):
        keras.utils.set_random_seed(seed)
        model = TransformerXL(training.build_model(arguments), 32)
        model.compile(
            keras.optimizers.Adam(2e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.fit(kind(documents(320), 32, 2), verbose=0)
        loss, weight = training.tested_losses(model, kind(documents(64), 32, 2))
        # The first segment of a document tells its byte to nobody.
        later = np.arange(len(loss)) % 8 > 0
        losses[name] = loss[later].sum() / weight[later].sum()
    # One position in two is one of two bytes.
    assert losses["without"] > 0.95 * math.log(2) / 2
    assert losses["with"] < 0.5 * math.log(2) / 2


def test_too_little_text_is_refused(tmp_path, error_line):
    path = tmp_path / "text"
    path.write_bytes(b"abc" * 30)
    arguments = [*SMALL.split(), "--text", str(path)]
    assert "--document 4" in error_line(vq_recurrence, arguments)
    path.write_bytes(bytes(range(256)) * 40)
    arguments += ["--test-bytes", "20"]
    assert "--test-bytes 20" in error_line(vq_recurrence, arguments)
