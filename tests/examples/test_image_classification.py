from types import SimpleNamespace

import numpy as np
import pytest

import image_classification
from image_classes import data

pytestmark = pytest.mark.any_backend

TINY = "--layers 1 --dim 8 --heads 2 --batch 32 --epochs 4 --seeds 0 --verbose 0 "
TINY = (TINY + "--learning-rate 0.02 --patch 4 --dropout 0").split()


def test_digits_are_split_once_and_for_all():
    images = data.digits()
    assert [len(part[1]) for part in (images.train, images.test)] == [1348, 449]
    for pixels, labels in (images.train, images.test):
        assert pixels.shape[1:] == (8, 8, 1)
        assert (pixels.min(), pixels.max()) == (0, 1)
        assert set(labels) == set(range(10))
    # No image is on both sides of the split.
    every = np.concatenate([images.train[0], images.test[0]])
    assert len(np.unique(every.reshape(len(every), -1), axis=0)) == len(every)


def test_labels_and_channels_of_downloads_are_flattened():
    images, labels = data.scale_images(np.full((2, 3, 3, 3), 255), [[1], [0]], 255)
    assert images.shape == (2, 3, 3, 3) and images.max() == 1
    assert labels.tolist() == [1, 0]


def test_distance_between_heads():
    from image_classes.training import head_distances

    maps = np.zeros((2, 3, 2, 2))
    maps[0, 0, 0, 0], maps[0, 1, 0, 1], maps[1, 2] = 3.0, 4.0, 1.0
    # Pairs of the first image: 5, 3, 4; of the second: 0, 2, 2.
    mean, variance = head_distances(maps)
    assert np.isclose(mean, 16 / 6)
    assert np.isclose(variance, (25 + 9 + 16 + 4 + 4) / 6 - mean**2)


def test_deit_tiny_has_the_parameters_of_the_paper():
    """Touvron et al., 2021, table 1: 5.7 million; the code's model has 5,717,416."""
    from image_classes.model import build_model

    arguments = image_classification.parse_arguments(["--size", "deit-tiny"])
    arguments.steps = 1
    model = build_model("softmax", (224, 224, 3), 1000, arguments)
    assert model.count_params() == 5_717_416
    one = ["--size", "deit-tiny", "--layers", "1"]
    arguments = image_classification.parse_arguments(one)
    assert (arguments.layers, arguments.dim, arguments.patch) == (1, 192, 16)


def test_it_learns_and_compares(tmp_path, printed_table, capsys):
    assert image_classification.main([*TINY, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    header, *rows = printed_table(printed)
    assert header[1] == "accuracy, %"
    names = ["fourier", image_classification.PAPER, "softmax"]
    assert [row[0] for row in rows] == names
    assert all(float(row[1].split()[0]) > 50 for row in rows)
    assert "chance 10.0%" in printed
    assert (tmp_path / "attention.png").read_bytes()[:4] == b"\x89PNG"


def test_seconds_of_training_are_the_mean_over_the_seeds(monkeypatch):
    from image_classes import training

    # Each training takes two seconds, but the last one four.
    times = iter([0, 2, 10, 12, 20, 24])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(training, "time", clock)
    arguments = [*TINY, "--seeds", "0", "1", "2", "--epochs", "1"]
    arguments += ["--batch", "512"]
    arguments = image_classification.parse_arguments(arguments)
    arguments.steps = 1
    result = training.train_and_measure("fourier", data.digits(), arguments)
    header, (row,) = image_classification.table([result])
    # The mean of 2, 2 and 4, and the deviation of a sample.
    assert row[header.index("training s")] == "2.7 ± 1.2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "nothing"], "nothing"),
        (["--patch", "3"], "--patch 3"),
        (["--dim", "9"], "--dim 9 --heads 4"),
        (["--epochs", "0"], "positive integer; received '0'"),
    ],
)
def test_errors_are_one_line(tmp_path, error_line, arguments, message):
    arguments = ["--out", str(tmp_path), *arguments]
    assert message in error_line(image_classification, arguments)
