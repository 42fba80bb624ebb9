"""Images as sequences of levels: sources and patches."""

import dataclasses

import numpy as np

from byte_lm.data import load_splits
from command_line import UsageError

SOURCES = ("digits", "photos", "cifar10", "periodic", "text")
# Synthetic rows: probability that a pixel differs from the row above.
REDRAWN = 0.15
SYNTHETIC = 4000


@dataclasses.dataclass
class Images:
    """Images, row by row, with the channels of a pixel in sequence.

    Attributes:
        train, test: Integers `(images, rows · columns)`.
        levels: Number of levels; values are below it.
        rows, columns: Size of the grid of values; with three channels, a pixel takes
            three columns.
        channels: 1 or 3; 0 for text, which is not an image.
    """

    train: np.ndarray
    test: np.ndarray
    levels: int
    rows: int
    columns: int
    channels: int = 1

    @property
    def length(self):
        return self.rows * self.columns


def load(source, size, levels, seed):
    """The images of a source.

    Args:
        source: One of `SOURCES`.
        size: Rows and columns of patches, of synthetic images and of pages of text.
        levels: Levels of brightness, for photographs, CIFAR-10 and synthetic images.
        seed: Seed of synthetic images.

    Raises:
        UsageError: If no image of that size is available.
    """
    if source == "digits":
        return digits()
    if source == "photos":
        return photos(size, levels)
    if source == "cifar10":
        return cifar10(levels)
    if source == "periodic":
        return periodic(size, levels, seed)
    return text(size)


def digits():
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels and 17 levels."""
    from sklearn.datasets import load_digits

    images = load_digits().images.astype("uint8").reshape(-1, 64)
    return Images(images[:-297], images[-297:], 17, 8, 8)


def photos(size, levels):
    """Patches of scikit-learn's two photographs, in shades of grey.

    The photographs are cut into squares of two by two patches. Every eighth square is
    held out; the others give patches at every half patch.
    """
    from sklearn.datasets import load_sample_images

    pieces = {"train": [], "test": []}
    for photo in load_sample_images().images:
        grey = quantise(photo.mean(-1), levels)
        corners = [
            (row, column)
            for row in range(0, grey.shape[0] - 2 * size + 1, 2 * size)
            for column in range(0, grey.shape[1] - 2 * size + 1, 2 * size)
        ]
        for number, (row, column) in enumerate(corners):
            square = grey[row : row + 2 * size, column : column + 2 * size]
            split, step = ("test", size) if number % 8 == 7 else ("train", size // 2)
            starts = range(0, size + 1, max(1, step))
            pieces[split] += [
                square[i : i + size, j : j + size].ravel()
                for i in starts
                for j in starts
            ]
    if not pieces["test"]:
        raise UsageError(
            f"--size {size} is too large: the photographs hold too few patches of this "
            "size"
        )
    train, test = (np.stack(pieces[split]) for split in ("train", "test"))
    return Images(train, test, levels, size, size)


def cifar10(levels):
    """CIFAR-10 in colour; Keras downloads it."""
    import keras

    (train, _), (test, _) = keras.datasets.cifar10.load_data()
    train, test = (
        quantise(split, levels).reshape(len(split), -1) for split in (train, test)
    )
    return Images(train, test, levels, 32, 96, channels=3)


def periodic(size, levels, seed):
    """Rows that repeat the row above, except for some pixels: a period of `size`."""
    random = np.random.default_rng(seed)
    images = random.integers(0, levels, (SYNTHETIC, size, size))
    kept = random.random(images.shape) >= REDRAWN
    for row in range(1, size):
        images[:, row] = np.where(kept[:, row], images[:, row - 1], images[:, row])
    images = images.reshape(SYNTHETIC, -1).astype("uint8")
    return Images(images[:-400], images[-400:], levels, size, size)


def text(size):
    """Pages of the Python standard library's source, which have no period."""
    splits = load_splits()

    def pages(data):
        count = len(data) // size**2
        return data[: count * size**2].reshape(count, size**2)

    test = pages(splits["test"])
    order = np.random.default_rng(0).permutation(len(test))
    return Images(pages(splits["train"]), test[order], 256, size, size, channels=0)


def quantise(x, levels):
    """Brightness from 0 to 255 as levels, of which there are at most 256."""
    x = np.asarray(x)
    # Of 8 bits, products with the number of levels would overflow; of 16, none does.
    x = x.astype(np.promote_types(x.dtype, "uint16"))
    return (x * levels // 256).astype("uint8")


def batches(images, batch, seed):
    """Endless `(inputs, targets)`, drawn at random: see `model_inputs`."""
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images.train), batch)
        values = images.train[chosen]
        yield model_inputs(values, images.levels), values.astype("int32")


def model_inputs(values, start):
    """The inputs that predict each value: a start token and the earlier values."""
    shifted = np.full(values.shape, start, "int32")
    shifted[:, 1:] = values[:, :-1]
    return {"token_ids": shifted, "padding_mask": np.ones_like(shifted)}
