"""Symbolic calls of layers."""

import keras
import numpy as np

from tests.autodiff import to_numpy


def symbolic(tensors):
    return keras.tree.map_structure(
        lambda x: keras.Input(
            batch_shape=tuple(x.shape), dtype=keras.backend.standardize_dtype(x.dtype)
        ),
        tensors,
    )


def check_symbolic_call(layer, x, state=None, **options):
    """A Functional model with the layer returns what the layer returns."""
    x = keras.ops.convert_to_tensor(x)
    tensors = {} if state is None else {"state": state}
    inputs = symbolic((x, tensors))
    outputs = layer(inputs[0], **inputs[1], **options)
    received = keras.Model(keras.tree.flatten(inputs), outputs)(
        keras.tree.flatten((x, tensors))
    )
    expected = layer(x, **tensors, **options)
    keras.tree.assert_same_structure(outputs, expected)
    keras.tree.assert_same_structure(received, expected)
    for spec, new, old in zip(
        *map(keras.tree.flatten, (outputs, received, expected)), strict=True
    ):
        assert spec.shape == tuple(old.shape)
        assert spec.dtype == keras.backend.standardize_dtype(old.dtype)
        np.testing.assert_allclose(to_numpy(new), to_numpy(old), rtol=1e-5, atol=1e-6)
