"""Labelled texts, and windows of them."""

import csv
import dataclasses
import hashlib
import itertools
import sysconfig
from pathlib import Path

import numpy as np

from command_line import UsageError

# Fraction of each class's texts that is held out.
HELD_OUT = 0.25
# Minimum size of a package.
LEAST_FILES, LEAST_BYTES = 4, 50_000
NOT_PACKAGES = ("site-packages", "test", "__pycache__")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Labelled texts, some held out.

    Attributes:
        labels: Names of the classes.
        train: For each class, the list of its texts, as bytes.
        test: For each class, the list of held-out texts.
    """

    labels: list
    train: list
    test: list


def standard_library(classes, root=None):
    """Source files of the Python standard library; the label is their package.

    Whole files are held out, by a hash of their names.

    Args:
        classes: Number of packages, the largest ones.
        root: Folder of packages. Defaults to the standard library's.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    packages = {
        folder.name: {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*.py"))
            if not set(path.relative_to(root).parts) & set(NOT_PACKAGES)
        }
        for folder in sorted(root.iterdir())
        if folder.is_dir() and folder.name not in NOT_PACKAGES
    }
    sizes = {
        name: sum(map(len, files.values()))
        for name, files in packages.items()
        if len(files) >= LEAST_FILES
    }
    labels = sorted(name for name, size in sizes.items() if size >= LEAST_BYTES)
    labels = sorted(sorted(labels, key=sizes.get)[-classes:])
    if len(labels) < 2:
        raise UsageError(
            f"{root}: must hold at least two packages with enough source code"
        )
    return split(labels, [packages[label] for label in labels])


def csv_file(path):
    """The rows of a CSV file with the columns `text` and `label`."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: {error}") from error
    if not rows or not {"text", "label"} <= set(rows[0]):
        raise UsageError(f"{path}: needs a header with the columns text and label")
    if any(row["text"] is None or row["label"] is None for row in rows):
        raise UsageError(f"{path}: a row lacks its text or its label")
    labels = sorted({row["label"] for row in rows})
    # Equal texts count as one text, on one side of the split.
    texts = [
        {row["text"]: row["text"].encode() for row in rows if row["label"] == label}
        for label in labels
    ]
    if len(labels) < 2 or min(map(len, texts)) < 2:
        raise UsageError(
            f"{path}: needs at least two labels, and at least two texts of each"
        )
    return split(labels, texts)


def split(labels, texts_by_name):
    """Holds out some of each class's texts, by a hash of their names."""
    train, test = [], []
    for texts in texts_by_name:
        order = sorted(
            texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()
        )
        count = max(1, int(HELD_OUT * len(order)))
        test.append([texts[name] for name in order[:count] if texts[name]])
        train.append([texts[name] for name in order[count:] if texts[name]])
    if not (all(train) and all(test)):
        raise UsageError(
            "each class needs texts that are not empty, to train on and to test on"
        )
    return Texts(labels, train, test)


def window(text, start, length):
    """`length` bytes from `start` on, padded, and their mask."""
    tokens = np.zeros(length, "int32")
    piece = np.frombuffer(text[start : start + length], np.uint8)
    tokens[: len(piece)] = piece
    return tokens, (np.arange(length) < len(piece)).astype("int32")


def stack(windows):
    tokens, masks = zip(*windows, strict=True)
    return {"token_ids": np.stack(tokens), "padding_mask": np.stack(masks)}


def batches(texts, length, batch, seed):
    """Endless batches of random windows, with equally likely classes.

    Yields:
        `(inputs, labels)`; batch `k` depends on `seed` and `k` only.
    """
    weights = [np.array(list(map(len, each)), float) for each in texts.train]
    for step in itertools.count():
        random = np.random.default_rng([seed, step])
        labels = random.integers(0, len(texts.labels), batch)
        windows = []
        for label in labels:
            sizes = weights[label]
            text = texts.train[label][random.choice(len(sizes), p=sizes / sizes.sum())]
            start = random.integers(0, max(0, len(text) - length) + 1)
            windows.append(window(text, start, length))
        yield stack(windows), labels.astype("int32")


def test_windows(texts, length, most):
    """At most `most` windows per class of the held-out texts, evenly spread.

    Returns:
        `(inputs, labels)`.
    """
    windows, labels = [], []
    for label, each in enumerate(texts.test):
        places = [
            (text, start)
            for text in each
            for start in range(0, max(1, len(text) - length // 2), length)
        ]
        picked = np.linspace(0, len(places) - 1, min(most, len(places))).astype(int)
        windows += [window(*places[i], length) for i in picked]
        labels += [label] * len(picked)
    return stack(windows), np.array(labels, "int32")
