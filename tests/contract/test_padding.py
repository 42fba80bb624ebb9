"""Point 4: padding changes nothing, whatever stands there."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.autodiff import gradient_function, gradients, to_numpy
from tests.contract.cases import BATCH, DIM, LENGTH, inputs

LENGTHS = (LENGTH, 21)
MASK = np.arange(LENGTH)[None] < np.array(LENGTHS)[:, None]


def padded(x, filler):
    return np.where(MASK[..., None], x, np.float32(filler))


def test_masks_are_those_of_the_dense_definition(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    # Holes, and a row that sees no key at first (or at all).
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
    expected, weights = case.expected(
        layer, x, x, query_mask=query_mask, key_mask=key_mask, causal=causal
    )
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_numpy(scores), weights, rtol=1e-4, atol=1e-5)


def test_no_key_at_all_gives_zero_heads(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    mask = np.zeros((BATCH, LENGTH), bool)

    def loss(x):
        return ops.sum(layer(x, x, key_mask=mask, use_causal_mask=causal) ** 2)

    output = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=causal))
    bias = to_numpy(layer.output_dense.bias)
    np.testing.assert_array_equal(output, np.broadcast_to(bias, output.shape))
    np.testing.assert_array_equal(gradients(loss, x)[0], np.zeros_like(x))


@pytest.mark.parametrize("filler", [1e9, np.nan], ids=["huge", "nan"])
def test_what_stands_at_padding_is_not_read(setting, filler):
    case, causal = setting
    layer, x = case.built(), inputs()
    weight = inputs(seed=3) * MASK[..., None]

    def call(x):
        return layer(x, x, query_mask=MASK, value_mask=MASK, use_causal_mask=causal)

    clean = to_numpy(call(padded(x, 0)))
    np.testing.assert_array_equal(to_numpy(call(padded(x, filler)))[MASK], clean[MASK])
    gradient_of = gradient_function(lambda x: ops.sum(ops.multiply(call(x), weight)))
    (gradient,) = gradient_of(padded(x, filler))
    assert np.all(gradient[~MASK] == 0)
    np.testing.assert_array_equal(gradient, gradient_of(padded(x, 0))[0])


def test_padding_does_not_poison_the_weights(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    variables = layer.trainable_weights

    def loss(x, *values):
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            output = layer(
                x, x, query_mask=MASK, value_mask=MASK, use_causal_mask=causal
            )
        return ops.sum(ops.where(MASK[..., None], output, 0.0) ** 2)

    gradient_of = gradient_function(loss)
    values = [to_numpy(variable) for variable in variables]
    _, *poisoned = gradient_of(padded(x, np.nan), *values)
    _, *clean = gradient_of(padded(x, 0), *values)
    for gradient, expected in zip(poisoned, clean, strict=True):
        np.testing.assert_array_equal(gradient, expected)


def test_a_padded_batch_equals_its_rows(setting):
    case, causal = setting
    layer, x = case.built(), inputs()
    batch = to_numpy(
        layer(x, x, query_mask=MASK, value_mask=MASK, use_causal_mask=causal)
    )
    for row, length in enumerate(LENGTHS):
        single = x[row : row + 1, :length]
        expected = to_numpy(layer(single, single, use_causal_mask=causal))
        np.testing.assert_allclose(
            batch[row : row + 1, :length], expected, rtol=1e-4, atol=1e-5
        )


def test_automatic_masks_equal_explicit_ones(case):
    layer, x = case.built(), inputs()
    inputs_ = keras.Input((None, DIM))
    masked = keras.layers.Masking()(inputs_)
    model = keras.Model(inputs_, layer(masked, masked))
    automatic = to_numpy(model(padded(x, 0)))
    explicit = layer(padded(x, 0), padded(x, 0), query_mask=MASK, value_mask=MASK)
    np.testing.assert_allclose(automatic, to_numpy(explicit), rtol=1e-6, atol=1e-6)
    unmasked = to_numpy(layer(padded(x, 0), padded(x, 0)))
    assert np.abs(automatic - unmasked).max() > 1e-3


def test_query_mask_reaches_the_output(case):
    layer = case.built()
    masked = keras.layers.Masking()(padded(inputs(), 0))
    output = layer(masked, masked)
    np.testing.assert_array_equal(to_numpy(output._keras_mask), MASK)


def test_attention_mask_over_keys_is_a_key_mask(case):
    layer, x = case.built(), inputs()
    expected = to_numpy(layer(x, x, key_mask=MASK))
    for dense_mask in (
        MASK[:, None],
        MASK[:, None, None],
        MASK[:, None].astype("int32"),
    ):
        output = layer(x, x, attention_mask=dense_mask)
        np.testing.assert_array_equal(to_numpy(output), expected)
    shared = MASK[1:2]
    np.testing.assert_array_equal(
        to_numpy(layer(x, x, attention_mask=shared)),
        to_numpy(layer(x, x, key_mask=np.repeat(shared, BATCH, 0))),
    )
