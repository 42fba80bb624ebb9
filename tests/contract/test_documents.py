"""Documents in a row do not see each other: each gives what it gives alone."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import (
    AdaptiveSpan,
    LinearAttention,
    PerformerAttention,
    VQAttention,
)
from tests.autodiff import compile_step, to_numpy
from tests.contract.cases import DIM, LENGTH
from tests.weight_gradients import assert_gradients_close, weight_gradient_function

TOLERANCE = dict(rtol=1e-4, atol=2e-5)
# The documents' lengths in each row.
LENGTHS = [(1, 20, 16), (9, 1, 1, 13, 13), (LENGTH,)]


def packed_inputs(seed):
    """`(x, ids, mask)`: rows of documents; the second has masked positions, NaN."""
    random = np.random.default_rng(seed)
    ids = np.stack([np.repeat(3 * np.arange(len(n)), n) for n in LENGTHS])
    ids = ids.astype("int32") + 2
    mask = np.ones(ids.shape, bool)
    mask[1] = random.random(LENGTH) > 0.3
    # All of a document, too.
    mask[1, 9] = False
    x = random.normal(size=(*ids.shape, DIM))
    return np.where(mask[..., None], x, np.nan).astype("float32"), ids, mask


def places_of(ids, mask):
    """The positions of each document that exist, as `(row, positions)`."""
    for row, row_ids in enumerate(ids):
        for number in np.unique(row_ids):
            yield row, np.flatnonzero((row_ids == number) & mask[row])


def alone(arrays, ids, mask):
    """Each document in a row of its own, with padding on the right, and the mask."""
    places = list(places_of(ids, mask))
    rows = [np.zeros((len(places), LENGTH, *a.shape[2:]), a.dtype) for a in arrays]
    exists = np.zeros((len(places), LENGTH), bool)
    for document, (row, positions) in enumerate(places):
        exists[document, : len(positions)] = True
        for new, old in zip(rows, arrays, strict=True):
            new[document, : len(positions)] = old[row, positions]
    return rows, exists


def built(case):
    layer = case.built()
    if not layer.takes_documents:
        pytest.skip("the layer refuses documents")
    return layer


def test_a_document_is_what_it_is_alone(setting):
    case, causal = setting
    layer = built(case)
    x, ids, mask = packed_inputs(1)
    output = to_numpy(
        layer(x, x, key_mask=mask, use_causal_mask=causal, document_ids=ids)
    )
    (rows,), exists = alone([x], ids, mask)
    expected = to_numpy(layer(rows, rows, key_mask=exists, use_causal_mask=causal))
    for document, (row, positions) in enumerate(places_of(ids, mask)):
        wanted = expected[document, : len(positions)]
        np.testing.assert_allclose(output[row, positions], wanted, **TOLERANCE)


def test_documents_do_not_change_one_another(setting):
    case, causal = setting
    layer = built(case)
    x, ids, _ = packed_inputs(2)
    x = np.nan_to_num(x)
    other = np.where((ids == ids[:, 5:6])[..., None], 1 - 3 * x, x)

    def call(x):
        return layer(x, x, use_causal_mask=causal, document_ids=ids)

    call = compile_step(call)
    outputs = [to_numpy(call(ops.convert_to_tensor(t))) for t in (x, other)]
    others = ids != ids[:, 5:6]
    np.testing.assert_array_equal(outputs[0][others], outputs[1][others])
    assert not np.allclose(outputs[0][~others], outputs[1][~others])


@pytest.mark.once_a_layer
def test_gradients_are_those_of_documents_alone(case):
    layer, causal = built(case), case.usual
    x, ids, mask = packed_inputs(3)
    weight = np.random.default_rng(4).normal(size=x.shape).astype("float32")

    def loss(x, weight, mask, ids):
        mask, ids = ops.greater(mask, 0.5), ops.cast(ids, "int32")
        output = layer(x, x, key_mask=mask, use_causal_mask=causal, document_ids=ids)
        output = ops.where(mask[..., None], output, ops.zeros_like(output))
        return ops.sum(output * weight)

    gradient_of = weight_gradient_function(loss, layer)
    floats = [t.astype("float32") for t in (mask, ids)]
    gradient, _, _, _, *weight_gradients = gradient_of(x, weight, *floats)
    np.testing.assert_array_equal(gradient[~mask], 0.0)
    rows, exists = alone([x, weight], ids, mask)
    floats = [t.astype("float32") for t in (exists, np.zeros(exists.shape))]
    expected, _, _, _, *expected_gradients = gradient_of(*rows, *floats)
    (gradient,), _ = alone([gradient], ids, mask)
    assert_gradients_close(
        [gradient, *weight_gradients], [expected, *expected_gradients]
    )


@pytest.mark.once_a_layer
def test_a_segment_says_whether_its_document_goes_on(causal_case):
    layer = built(causal_case)
    x, ids, mask = packed_inputs(5)
    state = layer.get_initial_state(len(x), LENGTH if layer.state_grows else None)
    outputs, start, last = [], 0, ids[:, :1]
    for length in (12, 1, 17, 7):
        own = slice(start, start + length)
        part = ops.convert_to_tensor(x[:, own])
        output, state = layer(
            part,
            part,
            key_mask=mask[:, own],
            use_causal_mask=True,
            state=state,
            document_ids=ids[:, own] - last,
        )
        outputs.append(to_numpy(output))
        start, last = start + length, ids[:, own][:, -1:]
    output = np.concatenate(outputs, axis=1)
    (rows,), exists = alone([x], ids, mask)
    expected = to_numpy(layer(rows, rows, key_mask=exists, use_causal_mask=True))
    for document, (row, positions) in enumerate(places_of(ids, mask)):
        wanted = expected[document, : len(positions)]
        np.testing.assert_allclose(output[row, positions], wanted, **TOLERANCE)


@pytest.mark.once_a_layer
def test_positions_that_ask_nothing_stay_keys_in_a_segment(causal_case):
    """As in a call without a state."""
    layer = built(causal_case)
    x = np.random.default_rng(2).normal(size=(2, LENGTH, DIM)).astype("float32")
    asks = np.random.default_rng(3).random((2, LENGTH)) > 0.4
    state = layer.get_initial_state(2, LENGTH if layer.state_grows else None)
    options = dict(query_mask=asks, use_causal_mask=True)
    expected = to_numpy(layer(x, x, **options))
    ids = np.zeros((2, LENGTH), "int32")
    found, _ = layer(x, x, state=state, document_ids=ids, **options)
    np.testing.assert_allclose(to_numpy(found)[asks], expected[asks], **TOLERANCE)


def test_a_segment_with_outputs_of_several_axes():
    layer = LinearAttention(2, 4, output_shape=(3, 4))
    x, ids, _ = packed_inputs(5)
    x, ids = np.nan_to_num(x), ids - ids[:, :1]
    expected = to_numpy(layer(x, x, document_ids=ids, use_causal_mask=True))
    state = layer.get_initial_state(len(x))
    found, _ = layer(x, x, document_ids=ids, use_causal_mask=True, state=state)
    np.testing.assert_allclose(to_numpy(found), expected, **TOLERANCE)


@pytest.mark.parametrize(
    "layer",
    [
        VQAttention(2, 4, num_codes=4),
        AdaptiveSpan(2, 4, max_span=8, penalty=0.1),
        PerformerAttention(2, 4, redraw_interval=3),
    ],
    ids=["vq", "adaptive-span", "performer"],
)
def test_layers_that_learn_in_their_calls_do_not_learn_by_document(layer):
    x, ids, _ = packed_inputs(5)
    x, ids = np.nan_to_num(x), ids - ids[:, :1]
    layer.build(x.shape, x.shape)
    arguments = dict(use_causal_mask=True, state=layer.get_initial_state(len(x)))
    layer(x, x, document_ids=ids, training=False, **arguments)
    layer(x, x, training=True, **arguments)
    with pytest.raises(ValueError, match="once for each document.*Received"):
        layer(x, x, document_ids=ids, training=True, **arguments)
