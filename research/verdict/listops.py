"""ListOps: nested lists of digits under MIN, MAX, MED and SUM modulo 10."""

import numpy as np

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


def expression(random, length, depth=DEPTH):
    """Random tokens, at most `length`, and their value."""
    if depth == 0 or length < 4:
        digit = int(random.integers(10))
        return [digit], digit
    operator = int(random.integers(10, 14))
    # A digit is left over for each argument.
    count = int(random.integers(2, min(MOST_ARGUMENTS, length - 2) + 1))
    shares = 1 + random.multinomial(
        length - 2 - count, random.dirichlet(np.ones(count))
    )
    tokens, values = [operator], []
    for share in shares:
        inner, value = expression(random, int(share), depth - 1)
        tokens += inner
        values.append(value)
    return [*tokens, CLOSE], OPERATORS[operator](values)


def rows(random, count, length):
    """Inputs of a classifier, and the values, `(count,)`."""
    tokens = np.full((count, length), PADDING, "int32")
    values = np.zeros(count, "int32")
    for row in range(count):
        found, values[row] = expression(random, length)
        tokens[row, : len(found)] = found
    mask = (tokens != PADDING).astype("int32")
    return {"token_ids": tokens, "padding_mask": mask}, values
