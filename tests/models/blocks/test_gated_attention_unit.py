"""Gated attention units: blocks of one gated head, without a feed-forward network."""

import numpy as np
import pytest

from keras_efficient_attn import (
    LinearAttention,
    LocalAttention,
    SoftmaxAttention,
    VQAttention,
)
from keras_efficient_attn.models import (
    EfficientTransformerBackbone,
    ResidualOptions,
    TransformerBlock,
    TransformerStack,
    gated_attention_units,
)
from keras_efficient_attn.models.blocks.residual import RESIDUALS
from tests.autodiff import to_numpy
from tests.ops.pieces import read_in_pieces
from tests.saving import assert_same_model, saved_and_loaded

WIDTH, LENGTH = 6, 9
UNIT = dict(
    num_heads=1,
    key_dim=4,
    value_dim=2 * WIDTH,
    use_gate=True,
    gate_activation="silu",
    value_activation="silu",
)


def draw(rows=2, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, LENGTH, WIDTH)).astype("float32")


def silu(x):
    return x / (1 + np.exp(-x))


def reference(block, x):
    """`x + (softmax(q·k) silu(W_v h) ∘ silu(W_g h)) W_o`, in float64."""
    x = x.astype("float64")
    norm = block.attention_residual.norm
    h = (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + norm.epsilon
    )
    h = h * to_numpy(norm.gamma) + to_numpy(norm.beta)
    attention = block.attention

    def project(dense):
        kernel = to_numpy(dense.kernel).astype("float64")[:, 0]
        return h @ kernel + to_numpy(dense.bias)[0]

    query, key = project(attention.query_dense), project(attention.key_dense)
    value, gate = project(attention.value_dense), project(attention.gate_dense)
    logits = np.einsum("bid,bjd->bij", query, key) / np.sqrt(query.shape[-1])
    logits = np.where(np.tril(np.ones((LENGTH, LENGTH))), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = attention.output_dense
    heads = weights @ silu(value) * silu(gate)
    return x + heads @ to_numpy(output.kernel)[0] + to_numpy(output.bias)


def randomise(layer):
    random = np.random.default_rng(3)
    for weight in layer.trainable_weights:
        weight.assign(0.5 * random.normal(size=weight.shape))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_unit_is_its_formula(grouped):
    options = dict(num_key_value_heads=1) if grouped else {}
    block = TransformerBlock(SoftmaxAttention(**UNIT, **options), None)
    block.build((None, None, WIDTH))
    randomise(block)
    x = draw()
    np.testing.assert_allclose(to_numpy(block(x)), reference(block, x), rtol=1e-5)
    config = block.attention.get_config()
    again = TransformerBlock(SoftmaxAttention.from_config(config), None)
    again.build((None, None, WIDTH))
    again.set_weights(block.get_weights())
    np.testing.assert_allclose(to_numpy(again(x)), reference(block, x), rtol=1e-5)


@pytest.mark.parametrize("residual", ["pre_norm", "gated", "reversible"])
@pytest.mark.parametrize(
    "attention",
    [
        LinearAttention(**UNIT),
        LocalAttention(window=3, **UNIT),
        VQAttention(num_codes=5, window=2, relative_positions=True, **UNIT),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_units_stream(attention, residual):
    blocks = [
        TransformerBlock(
            type(attention).from_config(attention.get_config()),
            None,
            residual=residual,
            layer_dropout=0.5,
        )
        for _ in range(3)
    ]
    stack = TransformerStack(blocks)
    stack.build((None, None, WIDTH))
    x = draw()
    received, _ = read_in_pieces(
        lambda x, state: stack(x, state=state),
        stack.get_initial_state(2),
        [x],
        sizes=(4, 1, LENGTH - 5),
    )
    np.testing.assert_allclose(received, to_numpy(stack(x)), rtol=1e-4, atol=1e-5)


def test_units_by_name_are_those_that_are_spelt_out():
    arguments = gated_attention_units("softmax", WIDTH, key_dim=4)
    backbone = EfficientTransformerBackbone(11, 1, **arguments)
    (block,) = backbone.transformer_layers
    x = draw()
    randomise(block)
    np.testing.assert_allclose(to_numpy(block(x)), reference(block, x), rtol=1e-5)
    assert gated_attention_units("softmax", 16)["head_dim"] == 128
    with pytest.raises(TypeError, match="name with options.*LinearAttention"):
        gated_attention_units(LinearAttention(1, 4), WIDTH)
    with pytest.raises(ValueError, match="hidden_dim=0"):
        gated_attention_units("softmax", 0)


@pytest.mark.any_backend
def test_a_backbone_without_feed_forward_networks(tmp_path):
    backbone = EfficientTransformerBackbone(
        vocabulary_size=11,
        num_layers=2,
        **gated_attention_units("local:window=3", WIDTH, key_dim=4),
        residual=ResidualOptions(norm="rms_norm", final_norm=False),
        use_bias=False,
    )
    names = {weight.path.split("/", 2)[-1] for weight in backbone.weights}
    assert {name.split("/")[0] for name in names if "embed" not in name} == {
        "attention",
        "attention_residual",
    }
    tokens = np.arange(10)[None] % 11
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    restored = saved_and_loaded(backbone, tmp_path)
    assert_same_model(restored, backbone, inputs, rtol=1e-6, atol=0)


@pytest.mark.any_backend
def test_feed_forward_options_need_a_width():
    with pytest.raises(ValueError, match="feed_forward.*intermediate_dim"):
        EfficientTransformerBackbone(11, 1, 1, 4, None, feed_forward="relu")


@pytest.mark.any_backend
def test_a_gate_activation_needs_a_gate():
    with pytest.raises(ValueError, match="use_gate=True.*gate_activation='silu'"):
        LinearAttention(2, 4, gate_activation="silu")


@pytest.mark.parametrize(
    "residual",
    ["pre_norm", "reordered", *(name for name in RESIDUALS if "gated" in name)],
)
def test_layer_dropout_drops_rows_and_scales_the_others(residual):
    rate, rows = 0.4, 400
    block = TransformerBlock(
        SoftmaxAttention(**UNIT), None, residual=residual, layer_dropout=rate
    )
    block.build((None, None, WIDTH))
    randomise(block)
    x = draw(rows)
    update = to_numpy(block(x)) - x
    trained = to_numpy(block(x, training=True)) - x
    kept = np.abs(trained).max((1, 2)) > 1e-6
    np.testing.assert_allclose(
        trained,
        np.where(kept[:, None, None], update / (1 - rate), 0.0),
        rtol=1e-4,
        atol=1e-5,
    )
    # Five standard deviations of the number of kept rows.
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / rows)


def test_position_dropout_acts_on_the_sinusoids_in_training_only():
    x = draw()
    options = dict(num_codes=5, window=4, relative_positions=True)
    layer = VQAttention(2, 4, position_dropout=0.5, **options)
    plain = VQAttention(2, 4, **options)
    outputs = {}
    for name, attention in (("dropped", layer), ("plain", plain)):
        attention.build(x.shape, x.shape)
        attention.trainable = False
        if name == "plain":
            attention.set_weights(layer.get_weights()[: len(attention.weights)])
        outputs[name] = [
            to_numpy(attention(x, x, use_causal_mask=True, training=training))
            for training in (False, True, True)
        ]
    np.testing.assert_allclose(outputs["dropped"][0], outputs["plain"][0], rtol=1e-5)
    np.testing.assert_allclose(outputs["plain"][0], outputs["plain"][1], rtol=1e-5)
    first, second = outputs["dropped"][1:]
    assert np.abs(first - second).max() > 1e-3
    # The first position sees itself only, for any distance logit.
    np.testing.assert_allclose(first[:, 0], second[:, 0], rtol=1e-5)
    with pytest.raises(ValueError, match="position_dropout.*relative_positions=True"):
        VQAttention(2, 4, position_dropout=0.5)
