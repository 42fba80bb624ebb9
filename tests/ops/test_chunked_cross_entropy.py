"""Cross-entropy in slices: what it refuses."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.ops import chunked_cross_entropy


def arrays(**changes):
    shapes = dict(hidden=(2, 5, 3), kernel=(3, 7), bias=(7,), labels=(2, 5))
    return {name: np.ones(shape) for name, shape in {**shapes, **changes}.items()}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("labels", (2, 1)),
        ("labels", (1, 5)),
        ("labels", (2, 5, 1)),
        ("kernel", (4, 7)),
        ("kernel", (3, 7, 1)),
        ("bias", (6,)),
        ("bias", (1,)),
        ("bias", (1, 7)),
        ("hidden", (2, 5)),
    ],
    ids=str,
)
@pytest.mark.any_backend
def test_shapes_that_do_not_agree_are_refused(name, shape):
    received = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"{name}\.shape={received}"):
        chunked_cross_entropy(**arrays(**{name: shape}))


@pytest.mark.any_backend
def test_sizes_that_are_not_known_agree():
    known = arrays()
    for length in (5, None):
        hidden = keras.KerasTensor((None, length, 3))
        labels = keras.KerasTensor((None, length), dtype="int32")
        losses = chunked_cross_entropy(**{**known, "hidden": hidden, "labels": labels})
        assert losses.shape[1:] == hidden.shape[1:2]
