"""Point 5: the whole sequence, any segments of it and single tokens agree."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.autodiff import compile_step, gradients, to_numpy
from tests.contract.cases import BATCH, DIM, LENGTH, inputs

SEGMENTS = {"segments": (1, 20, 3, 13), "tokens": (1,) * LENGTH}


def stream(layer, x, lengths, **kwargs):
    def call(x, state, masks):
        return layer(x, x, use_causal_mask=True, state=state, **masks)

    # Compile calls that repeat with the same shapes.
    call = compile_step(call) if len(set(lengths)) == 1 else call
    length = LENGTH if layer.state_grows else None
    state, outputs, start = layer.get_initial_state(x.shape[0], length), [], 0
    for length in lengths:
        piece = slice(start, start + length)
        masks = {name: mask[:, piece] for name, mask in kwargs.items()}
        output, state = call(ops.convert_to_tensor(x[:, piece]), state, masks)
        outputs.append(output)
        start += length
    return ops.concatenate(outputs, axis=1), state


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS.keys())
def test_segments_equal_the_whole(causal_case, lengths):
    layer, x = causal_case.built(), inputs()
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    streamed, _ = stream(layer, x, lengths)
    np.testing.assert_allclose(to_numpy(streamed), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.once_a_layer
def test_segments_may_be_empty(causal_case):
    """The first one too; on TensorFlow in one program for segments of any length."""
    layer, x = causal_case.built(), inputs()
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    state = layer.get_initial_state(BATCH, LENGTH if layer.state_grows else None)

    def call(x, state):
        return layer(x, x, use_causal_mask=True, state=state)

    call, outputs, start = compile_for_any_length(call, x, state), [], 0
    for length in (0, 20, 0, 1, 16):
        segment = ops.convert_to_tensor(x[:, start : start + length])
        output, state = call(segment, state)
        assert tuple(output.shape) == (BATCH, length, DIM)
        outputs.append(to_numpy(output))
        start += length
    streamed = np.concatenate(outputs, axis=1)
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-5)


def compile_for_any_length(function, x, state):
    """A `tf.function` for any batch and length of `x`; elsewhere the function."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    def any_rows(tensor, *sizes):
        return tf.TensorSpec(
            (None, *sizes, *tensor.shape[1 + len(sizes) :]), tensor.dtype
        )

    signature = (
        any_rows(ops.convert_to_tensor(x), None),
        {name: any_rows(tensor) for name, tensor in state.items()},
    )
    return tf.function(function, input_signature=signature, autograph=False)


@pytest.mark.once_a_layer
def test_masks_travel_with_the_segments(causal_case):
    layer, x = causal_case.built(), inputs()
    mask = np.random.default_rng(1).random((BATCH, LENGTH)) > 0.4
    whole = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=True))
    streamed, _ = stream(layer, x, SEGMENTS["segments"], key_mask=mask)
    if layer.keeps_places:
        # In a segment, a masked position is not read: rows are those without it.
        for row, exists in enumerate(mask):
            alone = x[row : row + 1, exists]
            alone = to_numpy(layer(alone, alone, use_causal_mask=True))
            whole[row, exists] = alone[0]
    np.testing.assert_allclose(to_numpy(streamed), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.once_a_layer
def test_gradients_flow_through_the_state_or_end_there(causal_case):
    layer, x = causal_case.built(), inputs()
    weight = inputs(seed=3)

    def segments(x):
        return ops.sum(ops.multiply(stream(layer, x, (20, 17))[0], weight))

    if not causal_case.gradient_through_state:
        # The second segment then has no gradient for the first.
        weight[:, :20] = 0
        (gradient,) = gradients(segments, x)
        assert np.all(gradient[:, :20] == 0) and np.all(gradient[:, 20:] != 0)
        return

    def whole(x):
        return ops.sum(ops.multiply(layer(x, x, use_causal_mask=True), weight))

    expected, streamed = gradients(whole, x)[0], gradients(segments, x)[0]
    np.testing.assert_allclose(
        streamed, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.once_a_layer
def test_a_keras_layer_may_hold_the_state(causal_case):
    layer, x = causal_case.built(), inputs()
    length = LENGTH if layer.state_grows else None
    holder = keras.layers.Layer()
    holder.state = layer.get_initial_state(BATCH, length)
    token = ops.convert_to_tensor(x[:, :1])
    output, _ = layer(token, token, use_causal_mask=True, state=holder.state)
    alone = layer(token, token, use_causal_mask=True)
    np.testing.assert_allclose(to_numpy(output), to_numpy(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.once_a_layer
def test_the_state_keeps_its_shape_and_width(causal_case):
    layer, x = causal_case.built(dtype="mixed_bfloat16"), inputs()
    before = causal_case.get_initial_state(layer)
    output, after = stream(layer, x, (20, 1, 16))
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert tuple(tensor.shape) == tuple(before[name].shape)
        assert tensor.shape[0] == BATCH
        assert tensor.dtype == before[name].dtype
        if not causal_case.caches:
            assert "float16" not in str(tensor.dtype)


@pytest.mark.once_a_layer
@pytest.mark.parametrize("integers", ["int64", "float32"])
def test_a_state_of_another_dtype_is_cast(causal_case, integers):
    """As from a layer of another policy; a state that stayed narrow would lose sums.

    Keras' export traces a model with floats for integers.
    """
    layer, x = causal_case.built(), inputs()
    state = causal_case.get_initial_state(layer)
    narrow = {
        name: ops.cast(tensor, integers if "int" in str(tensor.dtype) else "bfloat16")
        for name, tensor in state.items()
    }
    expected, _ = layer(x, x, use_causal_mask=True, state=state)
    output, after = layer(x, x, use_causal_mask=True, state=narrow)
    np.testing.assert_allclose(
        to_numpy(output), to_numpy(expected), rtol=1e-4, atol=1e-5
    )
    for name, tensor in after.items():
        assert tensor.dtype == state[name].dtype, name
