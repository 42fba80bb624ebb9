"""A row of a batch is what its sequence is alone, wherever its masked positions lie."""

import numpy as np
import pytest
from keras import ops

from tests.autodiff import compile_step, to_numpy
from tests.contract.cases import DIM, LENGTH
from tests.weight_gradients import assert_gradients_close, weight_gradient_function

# Positions that exist in each row of `masked_inputs` but the last two.
NUMBER = 23
TOLERANCE = dict(rtol=1e-4, atol=2e-5)


def masked_inputs(layer, seed):
    """`(x, mask)`: rows padded on the left, on the right, with holes; whole; empty.

    Positions that do not exist are NaN. Where positions keep their places, as in an
    image, only those on the right can be left out.
    """
    random, position = np.random.default_rng(seed), np.arange(LENGTH)
    right = position < NUMBER
    masks = [right[::-1], right, random.permutation(right)]
    if layer.keeps_places:
        masks = [right] * 3
    mask = np.stack([*masks, position >= 0, position < 0])
    x = random.normal(size=(*mask.shape, DIM))
    return np.where(mask[..., None], x, np.nan).astype("float32"), mask


def test_masked_positions_do_not_exist(setting):
    case, causal = setting
    layer = case.built()
    x, mask = masked_inputs(layer, 1)
    output = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=causal))
    alone = np.stack([x[row, mask[row]] for row in range(3)])
    expected = to_numpy(layer(alone, alone, use_causal_mask=causal))
    for row in range(3):
        np.testing.assert_allclose(output[row, mask[row]], expected[row], **TOLERANCE)
    whole = x[3:4]
    expected = to_numpy(layer(whole, whole, use_causal_mask=causal))
    np.testing.assert_allclose(output[3:4], expected, **TOLERANCE)
    bias = to_numpy(layer.output_dense.bias)
    hidden = output[~mask]
    np.testing.assert_array_equal(hidden, np.broadcast_to(bias, hidden.shape))


@pytest.mark.once_a_layer
def test_gradients_are_those_of_what_exists(case):
    layer, causal = case.built(), case.usual
    x, mask = masked_inputs(layer, 2)
    weight = np.random.default_rng(3).normal(size=x.shape).astype("float32")

    def loss(x, weight, mask):
        mask = ops.greater(mask, 0.5)
        output = layer(x, x, key_mask=mask, use_causal_mask=causal)
        output = ops.where(mask[..., None], output, ops.zeros_like(output))
        return ops.sum(output * weight)

    gradient_of = weight_gradient_function(loss, layer)
    gradient, _, _, *weight_gradients = gradient_of(x, weight, mask.astype("float32"))
    np.testing.assert_array_equal(gradient[~mask], 0.0)
    # The same rows with all that exists at the front.
    order = np.argsort(~mask, axis=1, kind="stable")
    front = (np.take_along_axis(t, order[..., None], axis=1) for t in (x, weight))
    at_front = np.sort(mask, axis=1)[:, ::-1].astype("float32")
    expected, _, _, *expected_gradients = gradient_of(*front, at_front)
    gradient = np.take_along_axis(gradient, order[..., None], axis=1)
    assert_gradients_close(
        [gradient, *weight_gradients], [expected, *expected_gradients]
    )


@pytest.mark.once_a_layer
def test_a_state_belongs_to_its_rows(causal_case):
    """Segments padded anywhere; rows that are joined, reordered, repeated, dropped."""
    layer, rows = causal_case.built(), 4
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, LENGTH, DIM)).astype("float32")
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    state = layer.get_initial_state(rows, LENGTH if layer.state_grows else None)

    def call(x, state, mask):
        mask = ops.greater(mask, 0.5)
        return layer(x, x, key_mask=mask, use_causal_mask=True, state=state)

    call = compile_step(call)
    # Which sequence a row reads, and how far it has read.
    source, read, step = np.arange(rows), np.zeros(rows, int), 0
    while read.min() < LENGTH:
        length = 1 if step % 3 == 1 else 9
        number = np.minimum(random.integers(0, length + 1, rows), LENGTH - read)
        mask = random.permuted(np.arange(length) < number[:, None], axis=1)
        segment = np.full((rows, length, DIM), np.nan, "float32")
        for row, exists in enumerate(mask):
            segment[row, exists] = x[source[row], read[row] :][: number[row]]
        tensors = ops.convert_to_tensor(segment), ops.cast(mask, "float32")
        output, new_state = call(tensors[0], state, tensors[1])
        if step % 4 == 3:
            # A draft that is thrown away: the old state is as it was.
            output, new_state = call(tensors[0], state, tensors[1])
        output = to_numpy(output)
        for row, exists in enumerate(mask):
            expected = whole[source[row], read[row] :][: number[row]]
            np.testing.assert_allclose(output[row, exists], expected, **TOLERANCE)
        state, read, step = new_state, read + number, step + 1
        # Rows that are done make room for others.
        left = np.flatnonzero(read < LENGTH)
        if len(left):
            chosen = random.permutation(np.resize(random.permutation(left), rows))
            source, read = source[chosen], read[chosen]
            state = {name: ops.take(t, chosen, axis=0) for name, t in state.items()}
    assert step >= 5
