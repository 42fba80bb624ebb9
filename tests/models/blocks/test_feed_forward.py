"""Dropout inside the feed-forward network, and blocks that are rebuilt."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.layers.residual.reversible import plain_residuals
from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    FeedForward,
    FeedForwardOptions,
    PositionOptions,
)
from keras_efficient_attn.models.blocks import transformer_stack
from tests.autodiff import to_numpy


@pytest.mark.parametrize("gated", [False, True])
def test_dropout_is_between_the_layers(gated):
    """An output is the sum over kept hidden units, divided by `1 - rate`."""
    width, rate = 3, 0.5
    layer = FeedForward(2 * width, "relu", gated=gated, dropout=rate)
    x = np.random.default_rng(0).normal(size=(50, width)).astype("float32")
    plain = to_numpy(layer(x))
    hidden = layer.hidden(x) * (layer.gate(x) if gated else 1.0)
    kernel = to_numpy(layer.output_dense.kernel)
    parts = to_numpy(hidden)[:, :, None] * kernel
    np.testing.assert_allclose(parts.sum(1), plain, rtol=1e-4, atol=1e-5)
    trained = to_numpy(layer(x, training=True))
    subsets = ((np.arange(2 ** (2 * width))[:, None] >> np.arange(2 * width)) & 1) * 1.0
    possible = np.einsum("su,nud->nsd", subsets, parts) / (1 - rate)
    nearest = np.abs(possible - trained[:, None]).max(-1).min(1)
    assert nearest.max() < 1e-4
    assert np.abs(trained - plain).max() > 1e-2
    assert FeedForward.from_config(layer.get_config()).dropout.rate == rate


def trained_weights(**options):
    keras.utils.set_random_seed(0)
    chosen = dict(
        vocabulary_size=11,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        attention="local:window=3",
        residual="reversible",
    )
    backbone = EfficientTransformerBackbone(**{**chosen, **options})
    model = EfficientCausalLM(backbone)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss)
    tokens = np.arange(10)[None] % 11
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    model.train_on_batch(inputs, (tokens + 1) % 11)
    return [to_numpy(weight) for weight in model.trainable_weights]


@pytest.mark.parametrize(
    "options",
    [
        dict(feed_forward=FeedForwardOptions("relu", dropout=0.5)),
        dict(feed_forward=FeedForwardOptions("relu", dropout=0.5, chunk_size=4)),
        dict(positions=PositionOptions("sinusoidal", each_layer=True, max_offset=100)),
        dict(attention="gated-delta", dtype="mixed_bfloat16"),
    ],
    ids=["dropout", "chunks", "offsets", "mixed-precision"],
)
def test_reversible_blocks_rebuild_what_they_computed(monkeypatch, options):
    """A step through rebuilt activations is that through activations that are kept."""
    rebuilt = trained_weights(**options)
    monkeypatch.setattr(
        transformer_stack,
        "reversible_residuals",
        lambda owner, sublayers, x1, x2: plain_residuals(sublayers, x1, x2)[:2],
    )
    kept = trained_weights(**options)
    for ours, theirs in zip(rebuilt, kept, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.any_backend
def test_dropout_is_not_for_convolutions():
    with pytest.raises(ValueError, match="dropout=0.1"):
        FeedForwardOptions(dropout=0.1, separable_convolution=True)
