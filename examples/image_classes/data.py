"""Small images with labels."""

import dataclasses
import importlib.util

import numpy as np

from command_line import UsageError

DATASETS = ("digits", "mnist", "cifar10")
# Fraction of the digits that is held out; the other datasets have a split.
HELD_OUT = 0.25


@dataclasses.dataclass(frozen=True)
class Images:
    """Labelled images, some held out.

    Attributes:
        train, test: `(images, labels)`: float32 `(count, height, width, channels)` in
            [0, 1], and integers `(count,)`.
        classes: Number of labels.
    """

    train: tuple
    test: tuple
    classes: int


def load(name):
    """One of `DATASETS`.

    Raises:
        UsageError: If the dataset is not available.
    """
    if name == "digits":
        return digits()
    # Imported here because Keras reads the backend on import.
    import keras

    try:
        train, test = getattr(keras.datasets, name).load_data()
    except Exception as error:
        # Keras raises a bare Exception if a download fails.
        raise UsageError(f"--dataset {name}: {' '.join(str(error).split())}") from error
    return Images(*(scale_images(*part, 255) for part in (train, test)), classes=10)


def digits():
    """Handwritten digits of 8 by 8 pixels, which ship with scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(
            "--dataset digits: scikit-learn is not installed: pip install "
            "'keras-efficient-attn[examples]'"
        )
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    held_out = int(HELD_OUT * len(order))
    parts = (
        scale_images(data.images[part], data.target[part], 16)
        for part in (order[held_out:], order[:held_out])
    )
    return Images(*parts, classes=10)


def scale_images(images, labels, brightest):
    """Images as float32 with a channel axis, and flat integer labels."""
    images = np.asarray(images, "float32") / brightest
    return images.reshape(*images.shape[:3], -1), np.asarray(labels, "int32").ravel()
