"""Heads and caches of SparseAttention."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import SparseAttention
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.ops import sparse_pattern
from tests.autodiff import to_numpy

BATCH, LENGTH, DIM = 2, 22, 6


def inputs():
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, LENGTH, DIM)).astype("float32")


@pytest.mark.parametrize(
    ("pattern", "factors"),
    [("strided", 0), ("strided", "split"), ("fixed", 1), ("fixed", "split")],
)
def test_scores_stand_where_the_pattern_is(pattern, factors):
    layer = SparseAttention(3, 4, pattern=pattern, stride=5, factors=factors)
    x = inputs()
    _, scores = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    scores = to_numpy(scores)
    expected = sparse_pattern(LENGTH, pattern, stride=5, factors=factors, num_heads=3)
    np.testing.assert_array_equal(scores > 0, np.broadcast_to(expected, scores.shape))
    rows = np.broadcast_to(expected.any(-1), scores.shape[:3])
    np.testing.assert_allclose(scores.sum(-1), rows, rtol=1e-5, atol=1e-6)


def test_the_fixed_pattern_keeps_summaries_only():
    def size(pattern):
        layer = SparseAttention(1, 4, pattern=pattern, stride=32)
        state = layer.get_initial_state(1, 1024)
        return sum(np.prod(tensor.shape) for tensor in state.values())

    # 32 summaries of 2 positions and a block, compared with every position.
    assert size("fixed") < 100 * 2 * 5 + 200
    assert size("strided") > 1024 * 2 * 4


def test_summaries_have_a_default():
    assert SparseAttention(1, 4, stride=64).pattern_arguments["summary"] == 1
    fixed = SparseAttention(1, 4, pattern="fixed", stride=64)
    assert fixed.pattern_arguments["summary"] == 4
    assert fixed.get_config()["summary"] is None
    near = SparseAttention(1, 4, pattern="fixed", stride=64, factors=0)
    assert near.pattern_arguments["summary"] == 1


class Attend(keras.layers.Layer):
    """Self-attention that `keras.remat` reruns for its gradient."""

    def __init__(self, attention, remat):
        super().__init__()
        self.attention = attention
        self.remat = remat

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        def attend(x):
            return self.attention(x, x, use_causal_mask=True)

        return keras.remat(attend)(x) if self.remat else attend(x)


def test_keras_remat_changes_nothing():
    x, start, results = inputs(), None, []
    for remat in (False, True):
        layer = SparseAttention(2, 4, stride=5)
        model = keras.Sequential([Attend(layer, remat)])
        model.build(x.shape)
        start = layer.get_weights() if start is None else start
        layer.set_weights(start)
        model.compile(keras.optimizers.SGD(1.0), "mse")
        model.train_on_batch(x, np.ones_like(x))
        results.append(layer.get_weights())
    for one, other, before in zip(*results, start, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert before.ndim < 3 or np.any(one != before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "dense"}, "pattern='dense'"),
        ({"stride": 2.5}, "stride=2.5"),
        ({"factors": "other"}, "factors='other'"),
        ({"num_heads": 1, "factors": "split"}, "num_heads=1"),
        ({"rotary_wavelength": -1}, "rotary_wavelength=-1"),
        ({"rotary_wavelength": 10, "key_dim": 3}, "key_dim=3"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    with pytest.raises(ValueError, match=message):
        SparseAttention(**{"num_heads": 2, "key_dim": 4, **options})


def test_by_name():
    layer = get_attention(
        "sparse:pattern=fixed,stride=8,factors=1", num_heads=2, key_dim=4
    )
    assert (layer.pattern, layer.stride, layer.factors) == ("fixed", 8, 1)
    local = get_attention(
        "local:query_block=(2,4),memory=(1,1),grid=(6,8)", num_heads=2, key_dim=4
    )
    assert (local.query_block, local.grid) == ((2, 4), (6, 8))
