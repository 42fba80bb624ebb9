"""Text as bytes: sources, splits and batches."""

import gzip
import hashlib
import itertools
import lzma
import sysconfig
from pathlib import Path

import numpy as np

from command_line import UsageError

SPLITS = ("train", "validation", "test")
# The usual split of enwik8: 90, 5 and 5 million of its 100 million bytes.
HELD_OUT = 0.05
# Largest number of excerpts for evaluation on held-out text.
PIECES = 16


def load_splits(text=None):
    """The training, validation and test bytes, as a dict of uint8 arrays.

    A single file is cut in three: the first 90 % for training, then 5 % and 5 %. A
    folder is split by file, in an order that depends on the file names only.

    Args:
        text: A file, or a folder. Defaults to the source of the Python standard
            library.

    Raises:
        UsageError: If there is no text at that path.
    """
    if text is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if _is_source(path, root)]
    else:
        root = Path(text)
        paths = [path for path in root.rglob("*") if path.is_file()]
    try:
        if root.is_file():
            splits = split_bytes(root.read_bytes())
        elif root.is_dir():
            splits = split_files({_name(path, root): path for path in paths})
        else:
            raise UsageError(f"--text {root}: no such file or folder")
    except OSError as error:
        raise UsageError(f"--text {root}: {error}") from error
    if not all(splits.values()):
        raise UsageError(
            f"--text {root}: too little text to split into {', '.join(SPLITS)}"
        )
    return {name: np.frombuffer(data, np.uint8) for name, data in splits.items()}


def split_bytes(data):
    """One text, cut into `{"train": ..., "validation": ..., "test": ...}`."""
    size = int(len(data) * HELD_OUT)
    start = len(data) - 2 * size
    pieces = data[:start], data[start : start + size], data[start + size :]
    return dict(zip(SPLITS, pieces, strict=True))


def split_files(paths):
    """Whole files, joined into `{"train": ..., "validation": ..., "test": ...}`."""
    groups = assign_files({name: path.stat().st_size for name, path in paths.items()})
    return {
        split: b"".join(paths[name].read_bytes() for name in names)
        for split, names in groups.items()
    }


def assign_files(sizes):
    """The file names of each split.

    Files are taken in the order of their names' hashes, which mixes the folders and
    is the same everywhere, first for the test and the validation text.

    Args:
        sizes: Bytes by file name.
        held_out: Part of all bytes for the test, and again for validation.
    """
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    wanted = HELD_OUT * sum(sizes.values())
    groups = {split: [] for split in SPLITS}
    for name in order:
        open_splits = (
            split
            for split in ("test", "validation")
            if sum(sizes[other] for other in groups[split]) < wanted
        )
        groups[next(open_splits, "train")].append(name)
    return groups


def batches(data, length, batch, seed, first_step=0):
    """Endless training batches; batch `k` depends on `seed` and `k` only.

    Yields:
        `(inputs, targets)`: as `model_inputs`, and the next bytes, int32
        `(batch, length)`.
    """
    for step in itertools.count(first_step):
        starts = np.random.default_rng([seed, step]).integers(
            0, len(data) - length, size=batch
        )
        rows = data[starts[:, None] + np.arange(length + 1)].astype("int32")
        yield model_inputs(rows[:, :-1]), rows[:, 1:]


def model_inputs(tokens):
    """Bytes `(batch, length)` as inputs of a model, without padding."""
    return {
        "token_ids": tokens.astype("int32"),
        "padding_mask": np.ones(tokens.shape, "int32"),
    }


def excerpts(data, size, length):
    """About `size` bytes: equally long pieces, spread evenly over the data.

    Neighbouring files resemble each other, and the start of a text differs from the
    rest. No piece is shorter than a window of `length` bytes and the byte after it.
    Returns all data if it is not longer than the pieces.
    """
    pieces = max(2, min(PIECES, size // (length + 1)))
    size = max(size, pieces * (length + 1))
    if len(data) <= size:
        return data
    width = size // pieces
    starts = np.arange(pieces) * (len(data) - width) // (pieces - 1)
    return data[starts[:, None] + np.arange(width)].reshape(-1)


def evaluation_windows(data, length):
    """Windows that score every byte except the first exactly once.

    Windows overlap by half, and each scores only bytes that no earlier window scored.
    So each byte has at least half a window of context, except in the first window.

    Returns:
        `(inputs, targets, weights)`, with `(windows, length)` tensors.
    """
    last = len(data) - 1 - length
    starts = np.append(np.arange(0, last, max(1, length // 2)), last)
    rows = data[starts[:, None] + np.arange(length + 1)].astype("int32")
    weights = np.ones((len(starts), length), "float32")
    for row, before in zip(weights[1:], length - np.diff(starts), strict=True):
        row[:before] = 0.0
    return model_inputs(rows[:, :-1]), rows[:, 1:], weights


def compressed_bits_per_byte(data):
    """Bits per byte of gzip and xz, each at its best, on `data`."""
    data = bytes(data)
    sizes = {
        "gzip": len(gzip.compress(data, 9)),
        "xz": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def _is_source(path, root):
    return "site-packages" not in path.relative_to(root).parts and path.is_file()


def _name(path, root):
    return path.relative_to(root).as_posix()
