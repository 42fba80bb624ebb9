import numpy as np
import pytest

import image_generation
from images import data

pytestmark = pytest.mark.any_backend

TINY = (
    "--layers 1 --dim 16 --heads 2 --steps 60 --batch 16 --learning-rate 0.02 "
    "--test-images 40 --samples 1 --verbose 0"
).split()


def test_photographs_are_cut_without_overlap_between_the_splits():
    images = data.photos(16, 256)
    assert images.train.shape[1] == images.test.shape[1] == images.length == 256
    assert len(images.train) > 2 * len(images.test) > 0
    rows = {row.tobytes() for row in images.train.reshape(-1, 16)}
    held_out = [row.tobytes() for row in images.test.reshape(-1, 16)]
    # Rows of plain sky occur in both; those of the rest do not.
    assert sum(row in rows for row in held_out) < 0.05 * len(held_out)
    coarse = data.photos(16, 8)
    assert coarse.train.max() < 8
    np.testing.assert_array_equal(coarse.test, images.test // 32)


def test_synthetic_rows_repeat_the_one_above():
    images = data.periodic(8, 16, seed=1)
    pixels = images.train.reshape(-1, 8, 8)
    same = (pixels[:, 1:] == pixels[:, :-1]).mean()
    assert abs(same - (1 - data.REDRAWN * 15 / 16)) < 0.01


def test_inputs_are_the_values_before():
    images = data.digits()
    inputs, targets = next(data.batches(images, 3, seed=0))
    assert (inputs["token_ids"][:, 0] == images.levels).all()
    np.testing.assert_array_equal(inputs["token_ids"][:, 1:], targets[:, :-1])
    assert targets.max() < images.levels


def test_it_learns_and_draws(tmp_path, capsys):
    arguments = [*TINY, "--attention", "local2d", "--out", str(tmp_path)]
    assert image_generation.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("local2d"))
    # Digits are half empty: the distribution of single values has 2.6 bits.
    values = np.bincount(data.digits().test.ravel(), minlength=17) / (297 * 64)
    entropy = -(values * np.log2(np.where(values > 0, values, 1))).sum()
    assert 0 < float(row[1]) < entropy
    for kind in ("samples", "completions"):
        picture = tmp_path / f"local2d_{kind}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "nothing"], "--attention nothing"),
        (["--levels", "500"], "--levels must be 2 to 256; received 500"),
        (["--data", "photos", "--size", "400"], "--size 400"),
    ],
)
def test_errors_are_one_line(error_line, arguments, message):
    assert message in error_line(image_generation, arguments)
