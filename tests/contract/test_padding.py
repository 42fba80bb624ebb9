"""Point 4: padding has no effect, whatever its content."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.autodiff import to_numpy
from tests.contract.cases import BATCH, DIM, LENGTH, inputs
from tests.weight_gradients import weight_gradient_function

LENGTHS = (LENGTH, 21)
MASK = np.arange(LENGTH)[None] < np.array(LENGTHS)[:, None]


def pad(x, filler):
    return np.where(MASK[..., None], x, np.float32(filler))


def test_masks_are_those_of_the_dense_definition(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    # Holes, and a row whose first queries (or all) see no key.
    key_mask = np.random.default_rng(1).random((BATCH, LENGTH)) > 0.4
    key_mask[0, :3] = False
    query_mask = np.random.default_rng(2).random((BATCH, LENGTH)) > 0.2
    output, scores = layer(
        x,
        x,
        query_mask=query_mask,
        value_mask=key_mask,
        use_causal_mask=causal,
        return_attention_scores=True,
    )
    expected, weights = case.oracle(
        layer, x, x, query_mask=query_mask, key_mask=key_mask, causal=causal
    )
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_numpy(scores), weights, rtol=1e-4, atol=1e-5)


def test_padding_is_not_read_and_gets_no_gradient(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    weight = inputs(seed=3) * MASK[..., None]

    def call(x, mask):
        mask = ops.greater(mask, 0.5)
        return layer(x, x, query_mask=mask, value_mask=mask, use_causal_mask=causal)

    def loss(x, mask):
        output = ops.where(MASK[..., None], call(x, mask), 0.0)
        return ops.sum(ops.multiply(output, weight))

    mask = MASK.astype("float32")
    gradient_of = weight_gradient_function(loss, layer)
    clean = to_numpy(call(pad(x, 0), mask))
    for filler in (1e9, np.nan):
        output = to_numpy(call(pad(x, filler), mask))
        np.testing.assert_array_equal(output[MASK], clean[MASK])
    expected, _, *expected_gradients = gradient_of(pad(x, 0), mask)
    gradient, _, *grad_weights = gradient_of(pad(x, np.nan), mask)
    assert np.all(gradient[~MASK] == 0)
    np.testing.assert_array_equal(gradient, expected)
    for poisoned, correct in zip(grad_weights, expected_gradients, strict=True):
        np.testing.assert_array_equal(poisoned, correct)

    # No key at all: the heads are zero, and only the output's bias has a gradient.
    nothing = np.zeros_like(mask)
    output = to_numpy(call(x, nothing))
    bias = to_numpy(layer.output_dense.bias)
    np.testing.assert_array_equal(output, np.broadcast_to(bias, output.shape))
    gradient, *_ = gradient_of(x, nothing)
    np.testing.assert_array_equal(gradient, np.zeros_like(x))


@pytest.mark.once_a_layer
def test_automatic_masks_equal_explicit_ones(case):
    layer = case.built()
    # Padding on the left, where queries of a causal layer would see it.
    mask = MASK[:, ::-1]
    x = np.where(mask[..., None], inputs(), np.float32(0))
    inputs_ = keras.Input((None, DIM))
    masked = keras.layers.Masking()(inputs_)
    model = keras.Model(inputs_, layer(masked, masked, **case.plain))
    automatic = to_numpy(model(x))
    explicit = layer(x, x, query_mask=mask, value_mask=mask, **case.plain)
    np.testing.assert_allclose(automatic, to_numpy(explicit), rtol=1e-6, atol=1e-6)
    unmasked = to_numpy(layer(x, x, **case.plain))
    assert np.abs(automatic - unmasked).max() > 1e-3


@pytest.mark.once_a_layer
def test_query_mask_reaches_the_output(case):
    layer = case.built()
    masked = keras.layers.Masking()(pad(inputs(), 0))
    output = layer(masked, masked, **case.plain)
    np.testing.assert_array_equal(to_numpy(output._keras_mask), MASK)


@pytest.mark.once_a_layer
def test_attention_mask_over_keys_is_a_key_mask(case):
    layer, x = case.built(), inputs()
    expected = to_numpy(layer(x, x, key_mask=MASK, **case.plain))
    for dense_mask in (
        MASK[:, None],
        MASK[:, None, None],
        MASK[:, None].astype("int32"),
    ):
        output = layer(x, x, attention_mask=dense_mask, **case.plain)
        np.testing.assert_array_equal(to_numpy(output), expected)
    shared = MASK[1:2]
    np.testing.assert_array_equal(
        to_numpy(layer(x, x, attention_mask=shared, **case.plain)),
        to_numpy(layer(x, x, key_mask=np.repeat(shared, BATCH, 0), **case.plain)),
    )
