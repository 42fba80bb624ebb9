"""A bias of the logits by distance, which layers with a window add in the window."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LocalAttention, PerformerAttention, VQAttention
from keras_efficient_attn.ops import local_attention, local_attention_state
from tests import dense
from tests.autodiff import to_numpy
from tests.layers.streams import stream

HEADS, DIM, WINDOW, LENGTH = 2, 4, 3, 11
BIAS = np.random.default_rng(5).normal(size=(2 * WINDOW - 1, HEADS))
CASES = ("local", "taylor", "vq")


def bias_of(distances):
    """The bias `(distances, heads)`, of distances from `1 - WINDOW` on."""
    return ops.convert_to_tensor(BIAS[distances + WINDOW - 1], "float32")


def make_layer(name):
    sizes = dict(num_heads=HEADS, key_dim=DIM, window=WINDOW, seed=0)
    if name == "local":
        return LocalAttention(**sizes)
    if name == "taylor":
        return PerformerAttention(**sizes, feature_map="taylor")
    return VQAttention(**sizes, num_codes=3, qk_norm=False)


def biased_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """The bias counts in the window only."""
    # VQAttention compares and stores keys of this scale.
    query, key = DIM**-0.25 * query, DIM**-0.25 * key
    products = dense.dots(query, key)
    distances = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    bias = BIAS[np.clip(distances + WINDOW - 1, 0, 2 * WINDOW - 2)].transpose(2, 0, 1)
    if isinstance(layer, LocalAttention):
        far = np.zeros_like(products)
    elif isinstance(layer, PerformerAttention):
        far = 1 + products + products**2 / 2
    else:
        far = dense.vq_similarity(query, key, to_numpy(layer.codebook))
    weights = np.where(abs(distances) < WINDOW, np.exp(products + bias), far)
    return dense.weigh(weights, value, key_mask, causal)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_it_counts_in_the_window_and_nowhere_else(name, causal):
    x = np.random.default_rng(0).normal(size=(2, LENGTH, 6)).astype("float32")
    layer = make_layer(name)
    without = layer(x, x, use_causal_mask=causal)
    layer.window_bias = bias_of
    whole = ops.convert_to_numpy(layer(x, x, use_causal_mask=causal))
    expected, _ = dense.layer_output(layer, biased_heads, x, x, causal=causal)
    np.testing.assert_allclose(whole, expected, atol=2e-5)
    assert np.max(abs(whole - ops.convert_to_numpy(without))) > 1e-2
    if causal:
        # A segment, and the rest token by token.
        streamed, _ = stream(layer, x, (5, *(1,) * (LENGTH - 5)))
        np.testing.assert_allclose(streamed, expected, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_window_longer_than_the_sequence(name):
    x = np.random.default_rng(1).normal(size=(1, LENGTH, 6)).astype("float32")
    short = x[:, :2]
    layer = make_layer(name)
    layer.window_bias = bias_of
    # Causal: the first two tokens read no later ones.
    first = ops.convert_to_numpy(layer(x, x, use_causal_mask=True))[:, :2]
    again = ops.convert_to_numpy(layer(short, short, use_causal_mask=True))
    np.testing.assert_allclose(again, first, atol=1e-5)


@pytest.mark.any_backend
def test_the_operation_checks_it():
    x = np.ones((1, 8, HEADS, DIM), "float32")
    bias = np.zeros((WINDOW, HEADS), "float32")
    options = dict(causal=True, window_bias=bias)
    for wrong, message in (
        (dict(window=WINDOW, causal=False), r"\(5, 2\).*\(3, 2\)"),
        (dict(query_block=4), "needs a `window`"),
        (dict(window=WINDOW, implementation="splash"), "needs implementation=None"),
    ):
        with pytest.raises(ValueError, match=message):
            local_attention(x, x, x, **{**options, **wrong})
    state = local_attention_state(1, HEADS, DIM, DIM, window=WINDOW)
    blocks, _ = local_attention(x, x, x, window=WINDOW, state=state, **options)
    reference = local_attention(
        x, x, x, window=WINDOW, implementation="reference", **options
    )
    np.testing.assert_allclose(*map(ops.convert_to_numpy, (blocks, reference)))
