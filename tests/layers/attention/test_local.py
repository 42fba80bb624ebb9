"""Images, which only LocalAttention supports."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LocalAttention
from tests import dense
from tests.autodiff import gradient_function, to_numpy
from tests.saving import assert_same_model, saved_and_loaded

BATCH, ROWS, COLUMNS, DIM = 2, 5, 4, 6


def make(order="raster", **options):
    options = {"grid": (ROWS, COLUMNS), **options}
    layer = LocalAttention(
        2, 4, query_block=(2, 3), memory=(1, 2), grid_order=order, **options
    )
    return layer


def images(seed=0):
    shape = (BATCH, ROWS, COLUMNS, DIM)
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def in_order(x, order):
    """Pixels of images as a sequence, in the image's order."""
    steps = dense.grid_steps((ROWS, COLUMNS), (2, 3), order)
    return np.stack([x[:, row, column] for row, column in steps], axis=1)


@pytest.mark.parametrize(
    ("order", "causal", "axes"),
    [("raster", False, None), ("block", True, None), ("block", False, (1, 2))],
)
def test_an_image_is_the_sequence_of_its_pixels(order, causal, axes):
    layer, x, key = make(order, grid=None, attention_axes=axes), images(), images(1)
    mask = np.random.default_rng(1).random((BATCH, ROWS, COLUMNS)) > 0.3
    output, scores = layer(
        x,
        x,
        key,
        query_mask=mask,
        key_mask=mask,
        use_causal_mask=causal,
        return_attention_scores=True,
    )
    assert layer.grid == (ROWS, COLUMNS)
    expected, weights = dense.layer_output(
        layer,
        dense.local_heads,
        *(in_order(tensor, order) for tensor in (x, x, key)),
        query_mask=in_order(mask, order),
        key_mask=in_order(mask, order),
        causal=causal,
    )
    assert tuple(output.shape) == x.shape
    output = in_order(to_numpy(output), order)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_numpy(scores), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["raster", "block"])
@pytest.mark.parametrize(("axes", "frames"), [((2, 3), 1), ((1, -2), 2)], ids=str)
def test_two_axes_of_a_video_are_images(order, axes, frames):
    layer = make(order, grid=None, attention_axes=axes)
    x = np.stack([images(seed) for seed in range(3)], axis=frames)
    mask = np.random.default_rng(1).random(x.shape[:-1]) > 0.3
    output, scores = layer(x, x, key_mask=mask, return_attention_scores=True)
    assert layer.grid == (ROWS, COLUMNS)
    symbolic = keras.Input(x.shape[1:])
    spec = layer(symbolic, symbolic, return_attention_scores=True)
    assert [s.shape[1:] for s in spec] == [output.shape[1:], scores.shape[1:]]
    for frame in range(3):
        image = in_order(x.take(frame, frames), order)
        expected, weights = dense.layer_output(
            layer,
            dense.local_heads,
            *[image] * 3,
            key_mask=in_order(mask.take(frame, frames), order),
        )
        received = in_order(to_numpy(output).take(frame, frames), order)
        np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)
        received = to_numpy(scores)[:, frame]
        np.testing.assert_allclose(received, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.any_backend
def test_three_axes_are_no_image():
    layer, x = make(attention_axes=(1, 2, 3)), np.ones((2, 2, 2, 5, DIM), "float32")
    with pytest.raises(ValueError, match=r"`attention_axes` must be the two axes of"):
        layer(x, x)


def test_images_in_a_functional_model(tmp_path):
    inputs = keras.Input((ROWS, COLUMNS, DIM))
    layer = make(output_shape=3)
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    assert model.output_shape == (None, ROWS, COLUMNS, 3)
    assert layer.compute_output_shape(inputs.shape, inputs.shape) == model.output_shape
    assert_same_model(saved_and_loaded(model, tmp_path), model, images())
    output, scores = layer(inputs, inputs, return_attention_scores=True)
    assert output.shape == (None, ROWS, COLUMNS, 3)
    assert scores.shape == (None, 2, ROWS * COLUMNS, ROWS * COLUMNS)


def test_images_of_another_size_are_refused():
    layer, x = make(), images()
    with pytest.raises(ValueError, match=r"`query` must be images.*\(2, 4, 4, 6\)"):
        layer(x[:, 1:], x[:, 1:])
    layer(x, x)
    with pytest.raises(ValueError, match=r"`value` must be images.*\(2, 5, 3, 6\)"):
        layer(x, x[:, :, 1:])
    with pytest.raises(ValueError, match="grid"):
        layer(np.ones((1, ROWS * COLUMNS + 1, DIM)), np.ones((1, 21, DIM)))


def test_an_image_of_unknown_size_needs_a_grid():
    inputs = keras.Input((None, None, DIM))
    with pytest.raises(ValueError, match="`query` must be images.*`grid` None"):
        make(grid=None)(inputs, inputs)


def test_sequences_without_a_grid_are_refused():
    layer, x = make(grid=None), np.ones((1, 20, DIM), "float32")
    with pytest.raises(ValueError, match="grid=None"):
        layer(x, x)


def test_dropout_of_weights_is_recomputed_alike():
    layer, x = LocalAttention(2, 4, window=3, dropout=0.5, seed=1), images()[:, 0]
    layer.build(x.shape, x.shape)
    # A loss that is linear in the values' bias: its gradient shows which weights were
    # dropped in the recomputation.
    layer.output_dense.kernel.assign(ops.ones(layer.output_dense.kernel.shape))
    bias = layer.value_dense.bias

    def loss(value):
        with keras.StatelessScope([(bias, value)]):
            return ops.sum(layer(x, x, training=True))

    zero = np.zeros(bias.shape, "float32")
    graded = gradient_function(loss, with_value=True)
    first, gradient = graded(zero)
    second, again = graded(zero + 1)
    np.testing.assert_array_equal(gradient, again)
    np.testing.assert_allclose(second - first, gradient.sum(), rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sliding_window_is_that_of_keras(causal):
    x = np.random.default_rng(0).normal(size=(2, 13, 6)).astype("float32")
    theirs = keras.layers.MultiHeadAttention(2, 4, sliding_window=3)
    layer = LocalAttention(2, 4, sliding_window=3)
    theirs.build(x.shape, x.shape)
    layer.build(x.shape, x.shape)
    layer.set_weights(theirs.get_weights())
    expected, scores = theirs(
        x, x, use_causal_mask=causal, return_attention_scores=True
    )
    output, weights = layer(x, x, use_causal_mask=causal, return_attention_scores=True)
    for received, correct in ((output, expected), (weights, scores)):
        np.testing.assert_allclose(
            to_numpy(received), to_numpy(correct), rtol=1e-4, atol=1e-5
        )
    restored = LocalAttention.from_config(layer.get_config())
    assert (layer.window, restored.window) == (3, 3)
    assert LocalAttention(2, 4, window=3, sliding_window=3).window == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "sliding_window": 3}, "sliding_window=3, window=4"),
        ({"query_block": 4, "sliding_window": 3}, "window=3, query_block=4"),
        ({"sliding_window": True}, "window=True"),
        ({"window": True}, "window=True"),
    ],
    ids=str,
)
def test_windows_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LocalAttention(2, 4, **options)
