"""ListOps: nested lists of digits under MIN, MAX, MED and SUM modulo 10.

A causal model names the value of every list at the bracket that closes it. With the
value of the whole list as its only target it would need many more rows than a CPU can
read.
"""

import itertools

import keras
import numpy as np

from verdict import language
from verdict.models import backbone, fit

SIZES = {
    "layers": 2,
    "heads": 4,
    "dim": 64,
    "steps": 1500,
    "batch": 4,
    "learning_rate": 2e-3,
    "length": 1000,
    "test_rows": 500,
}
# The rows for the test are drawn with it; training has seeds of two numbers.
TEST_SEED = 10**6
options = language.options

# Tokens: digits, then operators, the closing bracket and padding.
OPERATORS = {
    10: min,
    11: max,
    12: lambda digits: sorted(digits)[len(digits) // 2],
    13: lambda digits: sum(digits) % 10,
}
CLOSE, PADDING = 14, 15
VOCABULARY = 16
MOST_ARGUMENTS = 5
DEPTH = 10


def measure(options, seed, sizes):
    """Accuracy on whole rows, and on all lists in them."""
    decoder = backbone(options, sizes, VOCABULARY, "decoder", seed)
    logits = keras.layers.Dense(10, dtype="float32", name="values")(
        decoder(decoder.input)
    )
    model = keras.Model(decoder.input, logits)
    fit(model, batches(sizes, seed), sizes)
    inputs, values, closes = rows(
        np.random.default_rng(TEST_SEED), sizes["test_rows"], sizes["length"]
    )
    logits = model.predict(inputs, batch_size=sizes["batch"], verbose=0)
    right = logits.argmax(-1) == values
    last = inputs["padding_mask"].sum(1, keepdims=True) - 1
    return {
        "accuracy": float(np.take_along_axis(right, last, 1).mean()),
        "inner_accuracy": float(right[closes].mean()),
    }


def batches(sizes, seed):
    """Endless batches; batch `k` depends on `seed` and `k` only."""
    for step in itertools.count():
        random = np.random.default_rng([seed, step])
        yield rows(random, sizes["batch"], sizes["length"])


def rows(random, count, length):
    """Inputs of a decoder, values by token, and at which tokens they count."""
    tokens = np.full((count, length), PADDING, "int32")
    values = np.zeros((count, length), "int32")
    for row in range(count):
        found, known = expression(random, length)
        tokens[row, : len(found)] = found
        values[row, : len(found)] = known
    mask = (tokens != PADDING).astype("int32")
    return {"token_ids": tokens, "padding_mask": mask}, values, tokens == CLOSE


def expression(random, length, depth=DEPTH):
    """Random tokens, at most `length`, and the value of what ends at each.

    The value of an operator is 0.
    """
    if depth == 0 or length < 4:
        digit = int(random.integers(10))
        return [digit], [digit]
    operator = int(random.integers(10, 14))
    # A digit is left over for each argument.
    count = int(random.integers(2, min(MOST_ARGUMENTS, length - 2) + 1))
    shares = 1 + random.multinomial(
        length - 2 - count, random.dirichlet(np.ones(count))
    )
    tokens, values, arguments = [operator], [], []
    for share in shares:
        inner, known = expression(random, int(share), depth - 1)
        tokens += inner
        values += known
        arguments.append(known[-1])
    return [*tokens, CLOSE], [0, *values, OPERATORS[operator](arguments)]
