"""Token by token with a mask, as generation reads padding on the left."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import (
    LocalAttention,
    PerformerAttention,
    SparseAttention,
    VQAttention,
)
from keras_efficient_attn.layers.attention.base import AttentionCall

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
    "soft codes": (VQAttention, dict(num_codes=3, window=2, assignment="soft")),
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
    random = np.random.default_rng(0)
    query, key, value = (
        ops.convert_to_tensor(random.normal(size=(2, LENGTH, HEADS, DIM)), "float32")
        for _ in range(3)
    )
    mask = np.array([[0, 1, 1, 1, 0, 1, 1], [1] * LENGTH], "bool")
    mask = ops.convert_to_tensor(mask)
    whole, _ = layer.attend(
        query, key, value, AttentionCall(key_mask=mask, causal=True)
    )
    state, heads = layer.get_initial_state(2, LENGTH), []
    for position in range(LENGTH):
        token = [x[:, position : position + 1] for x in (query, key, value)]
        call = AttentionCall(
            key_mask=mask[:, position : position + 1], causal=True, state=state
        )
        head, state = layer.attend(*token, call)
        heads.append(head)
    np.testing.assert_allclose(
        ops.convert_to_numpy(ops.concatenate(heads, axis=1)),
        ops.convert_to_numpy(whole),
        rtol=1e-6,
        atol=1e-5,
    )
