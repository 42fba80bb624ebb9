"""N-grams of bytes, against a search through the text."""

import keras
import numpy as np
import pytest

from byte_lm.hashed_ngrams import HashedNGrams
from byte_lm.ngram_recall import NGramRecall
from tests.autodiff import to_numpy

pytestmark = pytest.mark.any_backend

VOCABULARY, ORDERS = 5, (3, 1, 4)


def text(batch=3, length=60, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, size=(batch, length))


def make(**options):
    defaults = {"vocabulary_size": VOCABULARY, "dim": 7, "orders": ORDERS}
    layer = NGramRecall(**{**defaults, "rows": 100_003, **options})
    layer.build((None, None))
    return layer


def search(layer, tokens):
    """Finds n-grams by comparison, from the end; −1 is before the text."""
    tables = to_numpy(layer.tables).reshape(len(ORDERS), VOCABULARY + 1, 7)
    output = np.zeros((*tokens.shape, 7))
    for row, line in enumerate(tokens):
        padded = [-1] * (max(ORDERS) + 1) + line.tolist()
        start = max(ORDERS) + 1
        for t in range(len(line)):
            for table, n in zip(tables, ORDERS, strict=True):
                gram = padded[start + t - n + 1 : start + t + 1]
                follower = -1
                for s in range(t - 1, -2, -1):
                    if padded[start + s - n + 1 : start + s + 1] == gram:
                        follower = line[s + 1]
                        break
                output[row, t] += table[follower + 1]
    return output


def test_output_is_that_of_a_search():
    layer, tokens = make(), text()
    np.testing.assert_allclose(
        to_numpy(layer(tokens.astype("int32"))), search(layer, tokens), atol=1e-6
    )


def test_ngrams_are_those_that_end_at_a_position():
    text = np.array([[7, 1, 2, 3, 9, 1, 2, 3, 5, 3, 2]], "int32")

    def equal_positions(*orders):
        vectors = to_numpy(HashedNGrams(4, orders=orders, rows=1000)(text))[0]
        return {
            (i, j)
            for j in range(text.shape[1])
            for i in range(j)
            if (vectors[i] == vectors[j]).all()
        }

    # "1 2" and "2 3" end at two places each, "1 2 3" at one more than once.
    assert equal_positions(2) == {(2, 6), (3, 7)}
    assert equal_positions(2, 3) == {(3, 7)}


# With 7 rows hashes collide, both in the text and in the state.
@pytest.mark.parametrize("rows", [100_003, 7])
@pytest.mark.parametrize("size", [1, 17])
def test_segments_give_what_the_whole_gives(rows, size):
    layer, tokens = make(rows=rows), text().astype("int32")
    whole = to_numpy(layer(tokens))
    state, pieces = layer.get_initial_state(len(tokens)), []
    for start in range(0, tokens.shape[1], size):
        piece, state = layer(tokens[:, start : start + size], state=state)
        pieces.append(to_numpy(piece))
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


def test_later_tokens_change_nothing_earlier():
    layer, tokens = make(), text().astype("int32")
    changed = tokens.copy()
    changed[:, 40:] = (changed[:, 40:] + 1) % VOCABULARY
    before, after = to_numpy(layer(tokens)), to_numpy(layer(changed))
    np.testing.assert_array_equal(before[:, :40], after[:, :40])
    assert np.any(before[:, 40:] != after[:, 40:])


def test_config_and_unknown_length():
    layer = make()
    again = NGramRecall.from_config(layer.get_config())
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, again(tokens))
    again.set_weights(layer.get_weights())
    x = text(2, 11).astype("int32")
    np.testing.assert_allclose(
        model.predict(x, verbose=0), to_numpy(layer(x)), atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"orders": ()}, "orders"),
        ({"orders": (2, 2)}, "orders"),
        ({"orders": (0,)}, "orders"),
        ({"orders": 3}, "orders"),
        ({"orders": (2.0,)}, "orders"),
        ({"rows": 2**21}, "rows"),
        ({"vocabulary_size": 0}, "vocabulary_size"),
        ({"dim": -1}, "dim"),
    ],
)
def test_errors_name_the_argument(options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        make(**options)


@pytest.mark.parametrize("layer_class", [NGramRecall, HashedNGrams])
def test_symbolic_calls_with_a_state(layer_class):
    sizes = {"vocabulary_size": 5} if layer_class is NGramRecall else {}
    layer = layer_class(dim=7, orders=(2, 3), rows=11, **sizes)
    state = {
        name: keras.Input(tensor.shape[1:], dtype="int32", name=name)
        for name, tensor in layer.get_initial_state(1).items()
    }
    output, new_state = layer(keras.Input((None,), dtype="int32"), state=state)
    assert output.shape == (None, None, 7)
    assert {k: v.shape for k, v in new_state.items()} == {
        k: v.shape for k, v in state.items()
    }


@pytest.mark.parametrize("kind", ["recall", "hashed"])
def test_rows_read_segments_of_different_lengths(kind):
    layer, tokens = make(rows=7), text().astype("int32")
    if kind == "hashed":
        layer = HashedNGrams(4, orders=ORDERS, rows=1000)
    whole, random = to_numpy(layer(tokens)), np.random.default_rng(1)
    state, read = layer.get_initial_state(len(tokens)), np.zeros(3, int)
    while read.min() < tokens.shape[1]:
        number = np.minimum(random.integers(0, 18, 3), tokens.shape[1] - read)
        mask = np.arange(17) < number[:, None]
        segment = np.full(mask.shape, 3, "int32")
        for row, count in enumerate(number):
            segment[row, :count] = tokens[row, read[row] :][:count]
        output, state = layer(segment, mask=mask, state=state)
        for row, count in enumerate(number):
            expected = whole[row, read[row] :][:count]
            np.testing.assert_array_equal(to_numpy(output)[row, :count], expected)
        read += number
