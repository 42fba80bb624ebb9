"""The backbone's outputs for every configuration, and its errors."""

import json

import keras
import numpy as np
import pytest

from keras_efficient_attn import (
    EfficientAttention,
    GatedDeltaAttention,
    LocalAttention,
    PerformerAttention,
    SoftmaxAttention,
)
from keras_efficient_attn.models import (
    CausalConvolution,
    EfficientTransformerBackbone,
    FeedForwardOptions,
    PositionOptions,
    ResidualOptions,
)
from tests.autodiff import float64, to_numpy
from tests.models import dense
from tests.models.cases import CASES, DECODERS, ELU, SIZES, inputs, make_backbone
from tests.saving import saved_and_loaded


def outputs(backbone, data):
    """Outputs at real positions, for each sequence."""
    return at_real_positions(backbone(data), data)


def compiled_outputs(backbone, data):
    """The outputs by `predict`, whose single compiled function handles every length."""
    return at_real_positions(backbone.predict(data, verbose=0), data)


def at_real_positions(result, data):
    if not isinstance(result, dict):
        return [to_numpy(result)[data["padding_mask"] == 1]]
    return [
        to_numpy(result[f"{side}_sequence_output"])[data[f"{side}_padding_mask"] == 1]
        for side in ("encoder", "decoder")
    ]


def assert_close(received, expected, **tolerance):
    for one, other in zip(received, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, **tolerance)


# Outputs.


# The backbone's dtype, with the tolerance.
DTYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [
        ("float32", dict(rtol=1e-3, atol=1e-4)),
        ("float64", dict(rtol=1e-10, atol=1e-11)),
    ],
    ids=["float32", "float64"],
)


@DTYPES
@pytest.mark.parametrize(
    "residual", ["pre_norm", "post_norm", "reordered", "update_norm"]
)
def test_a_decoder_is_the_transformer_of_the_definition(residual, dtype, tolerance):
    with float64():
        check_decoder(residual, dtype, tolerance)


def check_decoder(residual, dtype, tolerance):
    backbone = make_backbone(
        "softmax",
        attention="softmax",
        positions="rotary",
        residual=ResidualOptions(
            residual, norm="rms_norm" if residual == "post_norm" else "layer_norm"
        ),
        feed_forward=FeedForwardOptions("silu", gated=True),
        recurrence=2,
        dtype=dtype,
    )
    data = inputs("softmax")
    x = dense.numpy(backbone.token_embedding.embeddings)[data["token_ids"]]
    expected = dense.stack(backbone.decoder, x * np.sqrt(8), data["padding_mask"])
    real = data["padding_mask"] == 1
    assert_close(outputs(backbone, data), [expected[real]], **tolerance)


@DTYPES
def test_an_encoder_decoder_is_the_transformer_of_the_definition(dtype, tolerance):
    with float64():
        check_encoder_decoder(dtype, tolerance)


def check_encoder_decoder(dtype, tolerance):
    backbone = make_backbone(
        "encoder-decoder", attention="softmax", feed_forward="relu", dtype=dtype
    )
    data = inputs("encoder-decoder")
    table = dense.numpy(backbone.token_embedding.embeddings)

    def embed(side):
        tokens = data[f"{side}_token_ids"]
        return table[tokens] * np.sqrt(8) + dense.sinusoids(tokens.shape[1], 8)

    masks = data["encoder_padding_mask"], data["decoder_padding_mask"]
    memory = dense.stack(backbone.encoder, embed("encoder"), masks[0])
    decoded = dense.stack(
        backbone.decoder, embed("decoder"), masks[1], memory, masks[0]
    )
    expected = [memory[masks[0] == 1], decoded[masks[1] == 1]]
    assert_close(outputs(backbone, data), expected, **tolerance)


def test_convolution_reaches_back_and_not_forward():
    layer = CausalConvolution(kernel_size=3)
    x = np.random.default_rng(0).normal(size=(1, 6, 2))
    received = to_numpy(layer(x.astype("float32")))
    kernel = to_numpy(layer.kernel)
    for t in range(6):
        expected = x[0, t].copy()
        for back in range(min(3, t + 1)):
            expected += kernel[2 - back] * x[0, t - back]
        np.testing.assert_allclose(received[0, t], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing_and_lengths_may_vary(name):
    backbone, data = make_backbone(name), inputs(name)
    expected = outputs(backbone, data)
    changed = {
        key: np.where(data[key.replace("token_ids", "padding_mask")] == 1, value, 41)
        if key.endswith("token_ids")
        else value
        for key, value in data.items()
    }
    received = outputs(backbone, changed)
    assert_close(received, expected, rtol=1e-4, atol=1e-5)
    # The first row without its padding: the one sequence, or both.
    alone = {
        key: value[:1, : data[key.replace("token_ids", "padding_mask")][0].sum()]
        for key, value in data.items()
    }
    firsts = [mask[0].sum() for key, mask in data.items() if key.endswith("mask")]
    expected = [rows[:first] for rows, first in zip(expected, firsts, strict=True)]
    received = compiled_outputs(backbone, alone)
    assert_close(received, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_causal(name):
    backbone, data = make_backbone(name), inputs(name)
    data["padding_mask"] = np.ones_like(data["padding_mask"])
    expected = to_numpy(backbone(data))
    data["token_ids"][:, 8] += 1
    changed = to_numpy(backbone(data))
    np.testing.assert_allclose(changed[:, :8], expected[:, :8], rtol=1e-5, atol=1e-6)
    assert np.abs(changed[:, 8:] - expected[:, 8:]).max(axis=(0, 2)).min() > 1e-4


@pytest.mark.parametrize("kind", ["gated", "reordered", "post_norm"])
def test_any_kind_of_residual_can_have_a_final_norm(kind):
    options = dict(
        vocabulary_size=8,
        num_layers=1,
        num_heads=1,
        hidden_dim=4,
        intermediate_dim=8,
    )

    def make(final_norm):
        keras.utils.set_random_seed(0)
        residual = {"kind": kind, "final_norm": final_norm}
        return EfficientTransformerBackbone(**options, residual=residual)

    tokens = np.arange(8)[None]
    data = {"token_ids": tokens, "padding_mask": tokens >= 0}
    plain, normed = (to_numpy(make(final_norm)(data)) for final_norm in (None, True))
    centred = plain - plain.mean(-1, keepdims=True)
    expected = centred / np.sqrt(plain.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed, expected, rtol=1e-4, atol=1e-5)
    again = EfficientTransformerBackbone.from_config(make(True).get_config())
    assert again.decoder.final_norm is not None
    pre_norm = EfficientTransformerBackbone(**options, residual={"final_norm": False})
    assert pre_norm.decoder.final_norm is None


def test_recurrence_shares_weights():
    once, twice = (make_backbone("defaults", recurrence=n) for n in (1, 2))
    twice.set_weights(once.get_weights())
    data = inputs("defaults")
    stack = once.decoder
    # Applies the blocks again to their output before the final norm.
    x = once.embedding(data["token_ids"])
    for _ in range(2):
        for block in stack.blocks:
            x = block(x, padding_mask=data["padding_mask"])
    np.testing.assert_allclose(
        to_numpy(twice(data)), to_numpy(stack.final_norm(x)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "mixed_bfloat16") for name in CASES if name != "bytes"),
        ("bytes", "bfloat16"),
        ("mixed-rotary", "mixed_float16"),
    ],
)
def test_half_precision_is_near_full(name, dtype):
    data = inputs(name)
    full, half = make_backbone(name), make_backbone(name, dtype=dtype)
    # Random features and codes as well.
    half.set_weights(full.get_weights())
    expected = outputs(full, data)
    assert half.compute_dtype == dtype.removeprefix("mixed_")
    for one, other in zip(outputs(half, data), expected, strict=True):
        error = np.abs(one.astype("float32") - other)
        assert np.sqrt((error**2).mean()) < 0.1 * np.abs(other).max()


# Saving.


@pytest.mark.any_backend
@pytest.mark.parametrize("name", CASES)
def test_configuration_is_json_and_comes_back(name):
    backbone = make_backbone(name)
    config = json.loads(json.dumps(backbone.get_config()))
    restored = EfficientTransformerBackbone.from_config(config)
    assert json.loads(json.dumps(restored.get_config())) == config
    shapes = [tuple(weight.shape) for weight in backbone.weights]
    assert [tuple(weight.shape) for weight in restored.weights] == shapes


@pytest.mark.parametrize("name", CASES)
def test_file_comes_back(name, tmp_path):
    backbone, data = make_backbone(name), inputs(name)
    restored = saved_and_loaded(backbone, tmp_path)
    assert type(restored) is EfficientTransformerBackbone
    assert_close(outputs(restored, data), outputs(backbone, data), rtol=1e-5, atol=1e-6)


@pytest.mark.any_backend
def test_options_by_shorthand_dict_and_object_are_the_same():
    positions = PositionOptions("sinusoidal")
    assert PositionOptions.get("positions", "sinusoidal") == positions
    assert PositionOptions.get("positions", {"kind": "sinusoidal"}) == positions
    assert PositionOptions.get("positions", positions) is positions
    assert hash(PositionOptions.get("positions", "sinusoidal")) == hash(positions)
    assert PositionOptions.get("positions", positions.get_config()) == positions
    assert PositionOptions.get("positions", None) == PositionOptions()
    # A callable for its name.
    named = FeedForwardOptions("relu")
    assert FeedForwardOptions(keras.activations.relu) == named
    assert named.get_config()["activation"] == "relu"


# Forms of the attention argument.


@pytest.mark.any_backend
def test_the_default_attention_is_causal_only_in_decoders():
    sizes = dict(
        vocabulary_size=9, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=4
    )
    for architecture, expected in {
        "decoder": [GatedDeltaAttention],
        "encoder": [LocalAttention],
        "encoder_decoder": [LocalAttention, GatedDeltaAttention],
    }.items():
        backbone = EfficientTransformerBackbone(**sizes, architecture=architecture)
        layers = [block.attention for block in backbone.transformer_layers]
        assert [type(layer) for layer in layers] == expected
        again = EfficientTransformerBackbone.from_config(backbone.get_config())
        assert again.get_config() == backbone.get_config()
    # The encoder's rotates unless the backbone has other positions.
    for positions, wavelength in (
        (None, 10_000),
        ("rotary", 10_000),
        ("sinusoidal", None),
    ):
        backbone = EfficientTransformerBackbone(
            **sizes, architecture="encoder", positions=positions
        )
        attention = backbone.transformer_layers[0].attention
        assert attention.rotary_wavelength == wavelength
    # A convolution is a part of the encoder's default, and of no attention by name.
    for options, kernel_size in (
        ({}, 4),
        ({"convolution": 2}, 2),
        ({"attention": "local:window=64"}, None),
    ):
        backbone = EfficientTransformerBackbone(
            **sizes, architecture="encoder", **options
        )
        convolution = backbone.transformer_layers[0].convolution
        assert getattr(convolution, "kernel_size", None) == kernel_size


def test_attention_by_name_configuration_and_layer_are_the_same():
    layer = PerformerAttention(2, 4, feature_map="elu", chunk_size=4)
    config = keras.saving.serialize_keras_object(layer)
    backbones = [
        make_backbone("defaults", attention=attention)
        for attention in (ELU, config, layer, [layer])
    ]
    data = inputs("defaults")
    expected = outputs(backbones[0], data)
    for backbone in backbones[1:]:
        assert_close(outputs(backbone, data), expected, rtol=1e-6)
    # The layer is a template: the blocks have their own.
    assert not layer.built


@pytest.mark.any_backend
def test_a_list_cycles_over_the_layers():
    backbone = make_backbone("mixed-rotary", num_layers=5, attention=[ELU, "softmax"])
    kinds = [type(block.attention) for block in backbone.transformer_layers]
    assert kinds == [PerformerAttention, SoftmaxAttention] * 2 + [PerformerAttention]
    assert all(
        block.attention.rotary_wavelength == 10_000
        for block in backbone.transformer_layers
    )


def test_keras_own_softmax_gets_a_cache_and_keeps_its_options():
    layer = keras.layers.MultiHeadAttention(2, 4, dropout=0.25, use_gate=True)
    backbone = make_backbone("defaults", attention=layer)
    attention = backbone.transformer_layers[0].attention
    assert type(attention) is SoftmaxAttention
    assert attention.get_config()["dropout"] == 0.25
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype("float32")
    plain = keras.layers.MultiHeadAttention(2, 4, dropout=0.25, use_gate=True)
    plain.build(x.shape, x.shape)
    plain.set_weights(attention.get_weights()[: len(plain.get_weights())])
    np.testing.assert_allclose(
        to_numpy(attention(x, x, use_causal_mask=True)),
        to_numpy(plain(x, x, use_causal_mask=True)),
        rtol=1e-5,
        atol=1e-6,
    )


# Errors.


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(num_layers=0), ValueError, "num_layers"),
        (dict(num_heads=3), ValueError, "multiple of `num_heads`"),
        (dict(intermediate_dim=-1), ValueError, "-1"),
        (dict(attention="nothing"), ValueError, "nothing"),
        (dict(attention=3), TypeError, "3"),
        (dict(attention=[]), ValueError, "attention"),
        (
            dict(attention=None, encoder_attention=[], architecture="encoder_decoder"),
            ValueError,
            "encoder_attention",
        ),
        (dict(encoder_attention="softmax"), ValueError, "'decoder'"),
        (
            dict(attention=keras.saving.serialize_keras_object(keras.layers.Dense(2))),
            ValueError,
            "MultiHeadAttention",
        ),
        (dict(architecture="both"), ValueError, "both"),
        (dict(residual="none"), ValueError, "residual='none'"),
        (dict(residual={"norm": "batch"}), ValueError, "norm='batch'"),
        (dict(residual={"nrom": "rms_norm"}), ValueError, "nrom='rms_norm'"),
        (dict(feed_forward="nothing"), ValueError, "nothing"),
        (dict(feed_forward={"chunk_size": 0}), ValueError, "chunk_size=0"),
        (dict(positions="relative"), ValueError, "positions='relative'"),
        (dict(positions="learned"), ValueError, "max_length=None"),
        (dict(positions={"max_length": 5}), ValueError, "max_length=5"),
        (dict(positions={"each_layer": True}), ValueError, "each_layer=True"),
        (dict(recurrence=0), ValueError, "num_recurrences=0"),
        (dict(convolution=1), ValueError, "kernel_size"),
        (dict(tie_embeddings=False), TypeError, "tie_embeddings"),
        (dict(embedding="shared"), ValueError, "embedding='shared'"),
        (dict(embedding={"features": [3]}), TypeError, "features="),
    ],
)
def test_errors_name_what_was_received(options, error, message):
    with pytest.raises(error, match=message):
        EfficientTransformerBackbone(**{**SIZES, **options})


def test_the_encoder_has_its_own_attention():
    mixed = make_backbone("encoder-decoder", encoder_attention="softmax")
    data = inputs("encoder-decoder")
    tokens, mask = data["encoder_token_ids"], data["encoder_padding_mask"]
    softmax = make_backbone("encoder-decoder", attention="softmax")
    encoded, expected = (
        to_numpy(backbone.encode(tokens, mask))[mask == 1]
        for backbone in (mixed, softmax)
    )
    np.testing.assert_array_equal(encoded, expected)
    linear = make_backbone("encoder-decoder")
    assert (
        np.abs(to_numpy(linear.encode(tokens, mask))[mask == 1] - expected).max() > 0.01
    )
    names = [type(block.attention).__name__ for block in mixed.transformer_layers]
    assert names == ["SoftmaxAttention", "PerformerAttention"]
    again = EfficientTransformerBackbone.from_config(mixed.get_config())
    assert again.get_config() == mixed.get_config()


@pytest.mark.any_backend
def test_rotary_needs_a_layer_that_rotates():
    @keras.saving.register_keras_serializable(package="tests")
    class Plain(EfficientAttention):
        pass

    with pytest.raises(ValueError, match="Plain"):
        make_backbone("defaults", attention=Plain(2, 4), positions="rotary")
    for name in ("retention", "gated-linear", "delta", "gated-delta", "kimi-delta"):
        backbone = make_backbone("defaults", attention=name, positions="rotary")
        (block,) = backbone.transformer_layers
        assert block.attention.rotary_wavelength == 10_000


@pytest.mark.any_backend
def test_layers_that_say_nothing_of_themselves_are_refused():
    @keras.saving.register_keras_serializable(package="tests")
    class Mine(keras.layers.MultiHeadAttention):
        pass

    with pytest.raises(ValueError, match="must subclass.*Mine"):
        make_backbone("defaults", attention=Mine(2, 4))


@pytest.mark.any_backend
def test_a_memory_beside_a_cache():
    backbone = make_backbone("defaults", attention=["xl", "softmax"], num_layers=2)
    for memory_length, expected in ((5, 5), (None, 9)):
        state = backbone.get_initial_state(3, 9, memory_length)
        memory, cache = (block["attention"] for block in state["decoder"].values())
        assert memory["memory"].shape[:2] == (3, expected)
        assert cache["key"].shape[:2] == (3, 9)


@pytest.mark.any_backend
def test_learned_positions_end():
    backbone = make_backbone("recurrent")
    with pytest.raises(ValueError, match="32"):
        backbone(inputs("recurrent", length=33))
