"""Text as words: where they come from, their vocabulary, batches and windows."""

import collections
import itertools
import re

import numpy as np

from byte_lm.data import load_splits
from command_line import UsageError

SPLITS = ("train", "validation", "test")
END_OF_LINE, UNKNOWN = "<eos>", "<unk>"


def load_words(paths=None):
    """The words of the three splits, a dict of lists of strings.

    Args:
        paths: Files for training, validation and test in the format of WikiText: words
            between spaces, and a line break after a paragraph, which becomes
            `END_OF_LINE`. Defaults to the source of the Python standard library, whose
            words are names and numbers, and signs one by one.

    Raises:
        UsageError: If a file cannot be read, or is empty.
    """
    if paths is None:
        splits = load_splits()
        return {
            name: source_words(bytes(splits[name]).decode("utf-8", "replace"))
            for name in SPLITS
        }
    words = {}
    for name, path in zip(SPLITS, paths, strict=True):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--text {path}: {error}") from error
        words[name] = spaced_words(text)
        if not words[name]:
            raise UsageError(f"--text {path}: no words")
    return words


def spaced_words(text):
    """Words between spaces, each line ended by `END_OF_LINE`."""
    return [word for line in text.splitlines() for word in (*line.split(), END_OF_LINE)]


def source_words(text):
    """Names, numbers and signs, each line ended by `END_OF_LINE`."""
    lines = (re.findall(r"\w+|[^\w\s]", line) for line in text.splitlines())
    return [word for line in lines for word in (*line, END_OF_LINE)]


def make_vocabulary(words, least):
    """Numbers of the words that occur `least` times, the most frequent first.

    `UNKNOWN`, which stands for all others, is among them.
    """
    counts = collections.Counter(words)
    kept = [word for word, count in counts.most_common() if count >= least]
    return {word: i for i, word in enumerate(dict.fromkeys([*kept, UNKNOWN]))}


def encode(words, vocabulary):
    """An int32 array of the words' numbers."""
    unknown = vocabulary[UNKNOWN]
    return np.array([vocabulary.get(word, unknown) for word in words], "int32")


def batches(tokens, length, batch, seed):
    """Endless inputs of a `TiedLoss` model; batch `k` depends on `seed` and `k` only.

    Yields:
        `(inputs, zeros)`: the model's output is its loss.
    """
    for step in itertools.count():
        starts = np.random.default_rng([seed, step]).integers(
            0, len(tokens) - length, size=batch
        )
        rows = tokens[starts[:, None] + np.arange(length + 1)]
        yield loss_inputs(rows), np.zeros((batch, length), "float32")


def loss_inputs(rows):
    """`(batch, length + 1)` words as inputs, and the words after them."""
    return {"token_ids": rows[:, :-1], "labels": rows[:, 1:]}


def sliding_windows(tokens, length, stride):
    """Windows that score every word but the first once.

    A window begins `stride` after the one before, and only its last `stride` words
    count, so that each has `length - stride` words before it at least; of the first
    window, all count.

    Returns:
        `(rows, weights)`: `(windows, length + 1)` words, and `(windows, length)`, 1
        where the next word counts.
    """
    last = len(tokens) - 1 - length
    starts = np.append(np.arange(0, last, stride), last)
    rows = tokens[starts[:, None] + np.arange(length + 1)]
    weights = np.ones((len(starts), length))
    for row, before in zip(weights[1:], length - np.diff(starts), strict=True):
        row[:before] = 0
    return rows, weights
