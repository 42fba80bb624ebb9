"""Copying, reversing and adding, as sequences of symbols."""

import numpy as np

PAD, START, END, PLUS = range(4)
# The first ordinary symbol.
FIRST = 4


def symbols(task, alphabet):
    """The number of symbols, including padding, start, end and plus."""
    return FIRST + (10 if task == "addition" else alphabet)


def examples(task, count, lengths, alphabet, seed):
    """Random inputs and their outputs.

    Args:
        task: `"copy"`, `"reverse"`, or `"addition"`, of two numbers with equally many
            digits, least significant first, with `lengths` symbols in total.
        count: Number of sequences.
        lengths: `(shortest, longest)`.
        alphabet: Number of symbols to copy and reverse.
        seed: The same data for the same seed.

    Returns:
        Two lists of integer arrays, without start and end.
    """
    random = np.random.default_rng(seed)
    sources, targets = [], []
    for length in random.integers(lengths[0], lengths[1] + 1, count):
        if task == "addition":
            digits = random.integers(0, 10, (2, max((length - 1) // 2, 1)))
            sources.append(np.r_[FIRST + digits[0], PLUS, FIRST + digits[1]])
            targets.append(FIRST + _add(*digits))
            continue
        source = FIRST + random.integers(0, alphabet, length)
        sources.append(source)
        targets.append(source if task == "copy" else source[::-1])
    return sources, targets


def _add(first, second):
    """The sum's digits, least significant first, with one additional digit."""
    total, carry = [], 0
    for a, b in zip(first, second, strict=True):
        carry, digit = divmod(int(a + b) + carry, 10)
        total.append(digit)
    return np.array([*total, carry])


def model_inputs(sources, targets):
    """The inputs of encoder and decoder, the targets, and their weights."""
    outputs = [np.r_[target, END] for target in targets]
    shown = [np.r_[START, target] for target in targets]
    inputs = {}
    for side, rows in (("encoder", sources), ("decoder", shown)):
        tokens = pad(rows)
        inputs[f"{side}_token_ids"] = tokens
        inputs[f"{side}_padding_mask"] = (tokens != PAD).astype("int32")
    y = pad(outputs)
    return inputs, y, (y != PAD).astype("float32")


def pad(rows):
    """int32 `(rows, longest)`, with `PAD` on the right."""
    batch = np.full((len(rows), max(map(len, rows))), PAD, "int32")
    for i, row in enumerate(rows):
        batch[i, : len(row)] = row
    return batch
