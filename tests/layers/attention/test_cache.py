"""The end of a cache of keys."""

import numpy as np
import pytest

from keras_efficient_attn import FourierAttention, SoftmaxAttention, SparseAttention
from tests.autodiff import to_numpy

CAPACITY = 4


@pytest.mark.parametrize(
    ("layer_class", "options"),
    [
        (SoftmaxAttention, {}),
        (FourierAttention, {}),
        (SparseAttention, {"stride": 2}),
        (SparseAttention, {"stride": 2, "pattern": "fixed"}),
    ],
)
def test_positions_beyond_the_capacity_are_not_lost_in_silence(layer_class, options):
    layer = layer_class(num_heads=2, key_dim=4, **options)
    x = np.random.default_rng(0).normal(size=(2, CAPACITY + 2, 8)).astype("float32")
    layer.build(x.shape, x.shape)
    state = layer.get_initial_state(2, CAPACITY)
    outputs = []
    for t in range(x.shape[1]):
        token = x[:, t : t + 1]
        output, state = layer(token, token, use_causal_mask=True, state=state)
        outputs.append(to_numpy(output)[:, 0])
    assert np.isfinite(outputs[:CAPACITY]).all()
    assert np.isnan(outputs[CAPACITY:]).all()
