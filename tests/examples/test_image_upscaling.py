import numpy as np
import pytest

import image_upscaling
from images import data

pytestmark = pytest.mark.any_backend

TINY = (
    "--attention local2d --layers 1 --dim 8 --heads 2 --steps 2 --batch 2 "
    "--test-images 3 --samples 1 --verbose 0"
).split()


def test_small_images_are_means_of_squares():
    from images import upscaling

    images = data.digits()
    small = upscaling.shrink(images.test[:5], images, 4)
    pixels = images.test[:5].reshape(5, 8, 8)
    for row in range(2):
        for column in range(2):
            square = pixels[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            means = square.reshape(5, 16).mean(1)
            assert np.abs(small[:, 2 * row + column] - means).max() <= 0.5
    large = upscaling.enlarge(small, images, 4)
    np.testing.assert_array_equal(upscaling.shrink(large, images, 4), small)


def test_the_script_prints_its_table_and_draws(tmp_path, printed_table):
    assert image_upscaling.main([*TINY, "--out", str(tmp_path)]) == 0
    _, row = printed_table()
    assert row[0] == "local2d"
    # The error of the small images depends on the data only.
    test = data.digits().test[:3].reshape(3, 4, 2, 4, 2).astype("float64")
    means = np.rint(test.mean(axis=(2, 4), keepdims=True))
    assert float(row[4]) == pytest.approx(((test - means) ** 2).mean() ** 0.5, abs=0.01)
    assert 0 < float(row[1]) < 8 and 0 < float(row[3]) < 16
    assert (tmp_path / "local2d_x2.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--factor", "3"], "--factor 3 does not divide images of 8 x 8"),
        (["--attention", "nothing"], "--attention nothing"),
        (["--levels", "1"], "received 1"),
    ],
)
def test_errors_are_one_line(error_line, arguments, message, tmp_path):
    arguments = [*arguments, "--out", str(tmp_path)]
    assert message in error_line(image_upscaling, arguments)
