"""Smaller versions of parity and addition in Graves, 2016."""

import dataclasses

import numpy as np

# The eleventh class of a digit: no digit.
BLANK = 10


@dataclasses.dataclass
class Task:
    """Sequences with target classes and the difficulty of each position.

    Attributes:
        x: float32 `(count, length, dim)`.
        y: int32 `(count, length, outputs)`.
        weight: float32 `(count, length)`, 0 without a target.
        difficulty: int32 `(count, length)`.
        classes: Classes of each output.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    difficulty: np.ndarray
    classes: int


def parity(count, size, seed):
    """Whether an odd number of the entries is 1.

    One vector of `size` numbers: a random number of leading entries, from 1 to `size`
    (the difficulty), are 1 or −1; the others are 0.
    """
    random = np.random.default_rng(seed)
    difficulty = random.integers(1, size + 1, (count, 1))
    signs = random.choice([-1, 1], (count, size))
    x = np.where(np.arange(size) < difficulty, signs, 0)
    y = (x == 1).sum(-1) % 2
    return Task(
        x[:, None].astype("float32"),
        y[:, None, None].astype("int32"),
        np.ones((count, 1), "float32"),
        difficulty.astype("int32"),
        classes=2,
    )


def addition(count, size, seed, terms=3):
    """The sum of the numbers so far, digit by digit.

    `terms` numbers of 1 to `size` digits, one-hot, least significant digit first. The
    number of digits is the difficulty. The first number has no target.
    """
    random = np.random.default_rng(seed)
    difficulty = random.integers(1, size + 1, (count, terms))
    numbers = random.integers(0, 10**difficulty)
    width = size + 1
    sums = digits(numbers.cumsum(1), width)
    # The leading zeros of a short number follow its digits.
    given = digits(numbers, size)
    shown = np.arange(size) < difficulty[..., None]
    given = np.where(shown, np.where(given == BLANK, 0, given), BLANK)
    one_hot = np.eye(BLANK + 1)[given][..., :BLANK]
    weight = np.ones((count, terms))
    weight[:, 0] = 0
    return Task(
        one_hot.reshape(count, terms, -1).astype("float32"),
        sums.astype("int32"),
        weight.astype("float32"),
        difficulty.astype("int32"),
        classes=BLANK + 1,
    )


def digits(numbers, width):
    """Digits, least significant first; leading zeros are `BLANK`, except for 0."""
    powers = 10 ** np.arange(width)
    present = (numbers[..., None] >= powers) | (powers == 1)
    return np.where(present, numbers[..., None] // powers % 10, BLANK)


TASKS = {"parity": parity, "addition": addition}
