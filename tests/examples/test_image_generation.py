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
    # Rows of plain sky occur in both; other rows do not.
    assert sum(row in rows for row in held_out) < 0.05 * len(held_out)
    coarse = data.photos(16, 8)
    assert coarse.train.max() < 8
    np.testing.assert_array_equal(coarse.test, images.test // 32)


def test_brightness_of_eight_bits_is_divided_into_levels(monkeypatch):
    import keras

    values = np.arange(2 * 32 * 32 * 3).astype("uint8").reshape(2, 32, 32, 3)
    split = values, np.zeros((2, 1))
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: (split, split))
    for levels in (2, 32, 255, 256):
        images = data.cifar10(levels)
        expected = [value * levels // 256 for value in values.ravel().tolist()]
        assert images.train.dtype == "uint8" and images.length == 32 * 96
        assert images.test.ravel().tolist() == expected
    # Means of channels are no integers.
    assert data.quantise(np.array([127.5, 128.0]), 2).tolist() == [0, 1]


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


def test_it_learns_and_draws(tmp_path, printed_table):
    arguments = [*TINY, "--attention", "local2d", "--out", str(tmp_path)]
    assert image_generation.main(arguments) == 0
    _, row = printed_table()
    assert row[0] == "local2d"
    # Digits are half empty: the distribution of single values has 2.6 bits.
    values = np.bincount(data.digits().test.ravel(), minlength=17) / (297 * 64)
    entropy = -(values * np.log2(np.where(values > 0, values, 1))).sum()
    assert 0 < float(row[1]) < entropy
    for kind in ("samples", "completions"):
        picture = tmp_path / f"local2d_{kind}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_images_grow_rectangle_by_rectangle_as_the_layer_has_it():
    from images import model
    from keras_efficient_attn.layers import get_attention

    images = data.digits()
    order = model.order_of("local2d-blocks", images)
    assert order[:6].tolist() == [0, 1, 8, 9, 2, 3]
    name = model.attention_name("local2d-blocks", images)
    layer = get_attention(name, num_heads=1, key_dim=2)
    grid = np.arange(64, dtype="float32").reshape(1, 8, 8, 1)
    image = layer._axes_of(4).to_sequence(grid)
    np.testing.assert_array_equal(np.ravel(image), order)


class Counts:
    """A model that generates 1, 2, 3, … after the given values."""

    def compile(self, sampler):
        pass

    def generate(self, inputs, stop_token_ids):
        tokens, mask = inputs["token_ids"], inputs["padding_mask"]
        new = np.where(mask == 1, tokens, 1 + np.arange(tokens.shape[1]))
        return {"token_ids": new}


def test_what_is_given_stays_where_it_is():
    from images import model

    images = data.digits()
    images.levels = 100
    order = model.order_of("local2d-blocks", images)
    originals = images.test[:2]
    completed = model.complete(Counts(), originals, 32, images, order, seed=0)
    np.testing.assert_array_equal(completed[:, :32], originals[:, :32])
    # The first rectangle of the lower half is the 33rd to 36th value that is drawn.
    lower = completed.reshape(2, 8, 8)[:, 4:]
    np.testing.assert_array_equal(lower[0, :2, :2], [[34, 35], [36, 37]])


@pytest.mark.parametrize(("size", "block"), [(10, 2), (15, 3)])
def test_half_of_an_odd_number_of_block_rows_is_given(size, block):
    from images import model

    images = data.periodic(size, 16, seed=0)
    images.levels = 1000
    originals = images.test[:1]
    order = model.order_of("local2d-blocks", images)
    given = size**2 // 2
    completed = model.complete(Counts(), originals, given, images, order, seed=0)
    # Five rows of five blocks: two and a half are given, to half a block.
    whole, half = 2 * block, 2 * block
    pixels, original = (x.reshape(size, size) for x in (completed, originals))
    np.testing.assert_array_equal(pixels[:whole], original[:whole])
    np.testing.assert_array_equal(
        pixels[whole : whole + block, :half], original[whole : whole + block, :half]
    )
    kept = pixels < given
    assert kept.sum() == given
    np.testing.assert_array_equal(pixels[kept], original[kept])


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
