"""Sequences of the tasks: recall, forgetting, parity and permutations."""

import itertools

import keras
import numpy as np

from associations import TRACKING

NOTHING = 0
# Queries are more frequent close to the pairs: position i after them has a weight of i
# to this power.
GAP_POWER = -0.99
# The orders of three things, and the number of the order that two, one after the other,
# give: of `i` and then `j`.
ORDERS = np.array(list(itertools.permutations(range(3))))
PRODUCTS = np.array(
    [[np.flatnonzero((ORDERS == i[j]).all(1))[0] for j in ORDERS] for i in ORDERS]
)


def associations(random, rows, length, vocabulary, pairs, writes):
    """Pairs of a key and a value, followed by the keys again, as queries.

    A row is `k v k v …`, in which each key is written `writes` times with different
    values, in random order. Then each key occurs once, at a random position, with
    `NOTHING` between. Keys are tokens below `vocabulary // 2`, values are the tokens
    from there on, and no token is drawn twice per row.

    Args:
        random: numpy's generator.
        rows: Number of sequences.
        length: Length of a sequence, at least `pairs * (2 * writes + 1)`.
        vocabulary: Number of tokens.
        pairs: Keys per row.
        writes: Number of times that each key is written; the last value counts.

    Returns:
        `(tokens, targets, weights)`, each `(rows, length)`. A query's target is the
        last value written for its key, with weight `1 / pairs`, so that rows with few
        pairs, from which recall is learned first, count as much as others.
    """
    half = vocabulary // 2
    count = pairs * writes
    keys = _draw(random, rows, np.arange(1, half), pairs)
    values = _draw(random, rows, np.arange(half, vocabulary), count)
    written = _draw(random, rows, np.tile(np.arange(pairs), writes), count)
    row = np.arange(rows)
    latest = np.zeros((rows, pairs), int)
    for i in range(count):
        latest[row, written[:, i]] = values[:, i]

    tokens = np.full((rows, length), NOTHING, "int32")
    targets, weights = tokens.copy(), np.zeros(tokens.shape, "float32")
    tokens[:, 0 : 2 * count : 2] = np.take_along_axis(keys, written, axis=1)
    tokens[:, 1 : 2 * count : 2] = values
    # The largest log weights plus Gumbel noise are draws without replacement.
    slots = np.arange(1, length - 2 * count + 1)
    noise = random.gumbel(size=(rows, len(slots)))
    places = 2 * count + np.argsort(-GAP_POWER * np.log(slots) - noise)[:, :pairs]
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, latest, axis=1)
    np.put_along_axis(weights, places, 1 / pairs, axis=1)
    return tokens, targets, weights


def _draw(random, rows, choices, count):
    """`count` of the choices for each row, without replacement, in random order."""
    return random.permuted(np.tile(choices, (rows, 1)), axis=1)[:, :count]


def tracked(random, rows, length, task):
    """Random tokens, and at each position the state that they have led to.

    For parity, bits and the parity of the bits so far. For permutations, orders of
    three things, and the order after all of them so far.

    Each row has its own length, drawn log-uniformly, because states are learned from
    short sequences first.

    Returns:
        `(tokens, targets, weights)`, each `(rows, length)`. The weights of a row are
        equal up to its length, 0 beyond, and sum to 1.
    """
    tokens = random.integers(0, TRACKING[task], (rows, length), "int32")
    counted = np.exp(random.uniform(0, np.log(length), (rows, 1))).round()
    weights = (np.arange(length) < counted) / counted
    if task == "parity":
        targets = np.cumsum(tokens, axis=1) % 2
    else:
        states = itertools.accumulate(tokens.T, lambda state, i: PRODUCTS[state, i])
        targets = np.stack(list(states), axis=1)
    return tokens, targets, weights.astype("float32")


def model_inputs(tokens):
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


class Batches(keras.utils.PyDataset):
    """Training batches; recall and forgetting cycle through `--pairs`.

    The numbers of pairs are added in increasing order during the first half of
    training, because models with decays learn from few pairs first.

    Args:
        arguments: The parsed command line.
        seed: Batch `i` depends on `seed` and `i` only.
    """

    def __init__(self, arguments, seed):
        super().__init__()
        self.arguments, self.seed = arguments, seed

    def __len__(self):
        return self.arguments.steps

    def __getitem__(self, i):
        pairs = sorted(self.arguments.pairs)
        if pairs:
            joined = 1 + 2 * len(pairs) * i // self.arguments.steps
            pairs = pairs[i % min(joined, len(pairs))]
        random = np.random.default_rng((self.seed, i))
        tokens, targets, weights = sequences(
            self.arguments, random, self.arguments.batch, pairs
        )
        return model_inputs(tokens), targets, weights


def sequences(arguments, random, rows, pairs, times=1):
    """Sequences of `arguments.task`, with `times` the training length."""
    length = times * arguments.length
    if arguments.task in TRACKING:
        return tracked(random, rows, length, arguments.task)
    return associations(
        random, rows, length, arguments.vocabulary, pairs, arguments.writes
    )
