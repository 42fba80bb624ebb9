"""Token by token with a mask, as generation reads padding on the left."""

import numpy as np
import pytest

from keras_efficient_attn import (
    LocalAttention,
    PerformerAttention,
    SparseAttention,
    VQAttention,
)
from tests.autodiff import to_numpy
from tests.layers.streams import stream

LENGTH, HEADS, DIM = 7, 2, 4
LAYERS = {
    "window": (LocalAttention, dict(window=3, rotary_wavelength=50)),
    "blocks": (LocalAttention, dict(query_block=2, memory=1)),
    "grid": (LocalAttention, dict(query_block=(1, 2), memory=(1, 1), grid=(2, 4))),
    "pattern": (SparseAttention, dict(stride=2)),
    "features": (
        PerformerAttention,
        dict(num_features=4, normalize=False, rotary_wavelength=50),
    ),
    "features and window": (
        PerformerAttention,
        dict(feature_map="power", window=2, calibrated=True, rank=2),
    ),
    "codes": (VQAttention, dict(num_codes=3, window=None, rotary_wavelength=50)),
    "expanded codes": (VQAttention, dict(num_codes=3, window=2, order=2, rank=2)),
    "soft codes": (VQAttention, dict(num_codes=3, window=2, codes="soft")),
    "codes in the window": (
        VQAttention,
        dict(num_codes=3, window=2, quantize_window=True),
    ),
    "distances": (VQAttention, dict(num_codes=3, window=2, relative_positions=True)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_give_the_whole_sequence(name):
    layer_class, options = LAYERS[name]
    layer = layer_class(HEADS, DIM, **options)
    layer.build((None, None, 8), (None, None, 8))
    x = np.random.default_rng(0).normal(size=(2, LENGTH, 8)).astype("float32")
    mask = np.array([[0, 1, 1, 1, 0, 1, 1], [1] * LENGTH], "bool")
    expected = [
        to_numpy(layer(row[None, exists], row[None, exists], use_causal_mask=True))[0]
        for row, exists in zip(x, mask, strict=True)
    ]
    outputs, _ = stream(layer, x, (1,) * LENGTH, max_length=LENGTH, key_mask=mask)
    for row in range(2):
        received = outputs[row, mask[row]]
        np.testing.assert_allclose(received, expected[row], rtol=1e-4, atol=1e-5)
