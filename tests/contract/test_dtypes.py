"""Point 6: float64 is exact, half precision is close, and nothing overflows."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.autodiff import float64, gradient_function, to_numpy
from tests.contract.cases import DIM, LENGTH, inputs
from tests.ops.pieces import read_in_pieces


def test_float64_is_float64_throughout(case):
    causal = case.usual
    with float64():
        layer = case.built(dtype="float64")
        x = inputs().astype("float64")
        output = to_numpy(layer(x, x, use_causal_mask=causal))
        expected, _ = case.oracle(layer, x, x, causal=causal)
    assert output.dtype == "float64"
    np.testing.assert_allclose(output, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.once_a_layer
def test_streams_in_float64_are_float64_throughout(causal_case):
    with float64():
        layer, x = causal_case.built(dtype="float64"), inputs().astype("float64")
        whole = to_numpy(layer(x, x, use_causal_mask=True))
        streamed, _ = read_in_pieces(
            lambda x, state: layer(x, x, use_causal_mask=True, state=state),
            causal_case.get_initial_state(layer),
            [x],
            sizes=(7, 1, LENGTH - 8),
        )
    np.testing.assert_allclose(streamed, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.once_a_layer
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_integers_are_cast_to_the_compute_dtype(case, dtype):
    layer = case.built(dtype=dtype)
    x = np.random.default_rng(0).integers(-3, 4, size=(2, 9, DIM)).astype("int32")
    floats = x.astype("float32")
    expected = layer(floats, floats, **case.plain)
    output = layer(x, x, **case.plain)
    assert output.dtype == expected.dtype
    expected, output = (to_numpy(ops.cast(t, "float32")) for t in (expected, output))
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.once_a_layer
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_is_near_float32(case, dtype):
    causal = case.usual
    layer = case.built(dtype=f"mixed_{dtype}")
    x = inputs()
    output = layer(x, x, use_causal_mask=causal)
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    assert {str(w.dtype) for w in layer.trainable_weights} == {"float32"}
    expected, _ = case.oracle(layer, x, x, causal=causal)
    error = np.abs(to_numpy(ops.cast(output, "float32")) - expected)
    # A few rounded queries fall into another bucket.
    error = error.max() if case.smooth else np.median(error)
    # Projections round to 8 or 11 bits; kernels are at most quartic in them.
    limit = 0.1 if dtype == "bfloat16" else 0.02
    assert error < limit * np.abs(expected).max()


@pytest.mark.parametrize(
    "dtype",
    [
        # The range of float32 with fewer digits.
        pytest.param("mixed_bfloat16", marks=pytest.mark.once_a_layer),
        "mixed_float16",
    ],
)
def test_outputs_and_gradients_stay_finite(case, dtype):
    causal = case.usual
    layer = case.make(dtype=dtype, **case.long)
    length = case.long_length
    layer.build((1, length, DIM), (1, length, DIM))
    x = inputs(batch=1, length=length)

    def loss(x, scale):
        scaled = ops.cast(x * scale, layer.compute_dtype)
        output = layer(scaled, scaled, use_causal_mask=causal)
        return ops.mean(ops.cast(output, "float32"))

    graded = gradient_function(loss, with_value=True)
    for scale in (1e-3, 1.0, 1e3):
        value, *gradients = graded(x, np.float32(scale))
        if dtype == "mixed_float16" and scale > 1e-3 and case.sums:
            # The requested sum over all keys exceeds float16's range.
            continue
        # A mean is finite only if every output is.
        assert np.isfinite(value), scale
        for gradient in gradients:
            assert np.all(np.isfinite(gradient)), scale
