"""Layers whose state decays or is corrected: their arguments and special cases."""

import json

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import (
    DeltaAttention,
    GatedDeltaAttention,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    RetentionAttention,
)
from keras_efficient_attn.layers import feature_maps
from tests import dense
from tests.autodiff import to_numpy

DIM, LENGTH = 12, 19
PLAIN = dict(
    output_norm=None,
    output_gate=None,
    convolution=None,
    activation=None,
    rotary_wavelength=None,
)


def inputs(seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(2, LENGTH, DIM)).astype("float32")


def test_without_decay_and_norm_it_is_linear_attention():
    layer = RetentionAttention(2, 8, decays=(1.0, 1.0), **PLAIN)
    linear = LinearAttention(2, 8, feature_map="identity", normalize=False)
    x = inputs()
    layer.build(x.shape, x.shape)
    linear.build(x.shape, x.shape)
    linear.set_weights(layer.get_weights())
    _, scores = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    _, expected = linear(x, x, use_causal_mask=True, return_attention_scores=True)
    expected = to_numpy(expected) / np.sqrt(8)
    np.testing.assert_allclose(to_numpy(scores), expected, rtol=1e-5, atol=1e-6)


def test_retention_decays_by_the_distance():
    layer, x = RetentionAttention(3, 8, rotary_wavelength=None), inputs()
    _, scores = layer(x, x, use_causal_mask=True, return_attention_scores=True)
    query, key = (to_numpy(side(x)) for side in (layer.query_dense, layer.key_dense))
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    decays = 1 - 2.0 ** (-5 - np.arange(3))
    factors = np.tril(decays[:, None, None] ** np.maximum(distance, 0))
    expected = dense.dots(query, key) * factors / np.sqrt(8)
    np.testing.assert_allclose(to_numpy(scores), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_keeps_heads_too_large_for_half_precision(training):
    """The norm that follows divides them by their size."""
    options = dict(output_gate=None, dtype="mixed_float16")
    layer, x = RetentionAttention(2, 8, dropout=0.1, **options), 100 * inputs()
    output = layer(x, x, use_causal_mask=True, training=training)
    expected, _ = dense.layer_output(layer, dense.gated_heads, x, x, causal=True)
    received = to_numpy(ops.cast(output, "float32"))
    if training:
        assert np.isfinite(received).all()
        return
    limit = 0.02 * np.abs(expected).max()
    np.testing.assert_allclose(received, expected, rtol=0, atol=limit)


def test_a_repeated_key_reads_the_last_value():
    layer = DeltaAttention(1, 8, use_bias=False, output_norm=None, convolution=None)
    # So large that keys have norm 1.
    x = np.repeat(10 * inputs()[:, :1], LENGTH, axis=1)
    layer.build(x.shape, x.shape)
    (kernel,) = layer._beta_layers[0].get_weights()
    # Large logits of one sign give β = 1.
    sign = np.sign(x[0, 0])[:, None]
    layer._beta_layers[0].set_weights([1e3 * sign * np.ones_like(kernel)])
    _, scores = layer(x[:1], x[:1], use_causal_mask=True, return_attention_scores=True)
    weights = to_numpy(scores)[0, 0]
    np.testing.assert_allclose(weights - np.diag(np.diag(weights)), 0, atol=1e-5)
    assert np.all(np.abs(np.diag(weights)) > 1e-3)


@pytest.mark.parametrize("layer_class", [GatedDeltaAttention, KimiDeltaAttention])
def test_decays_begin_slow_and_differ(layer_class):
    layer, x = layer_class(4, 8, seed=3), inputs()
    layer.build(x.shape, x.shape)
    log_decay, beta = layer._rates(ops.zeros_like(x))
    log_decay = to_numpy(log_decay)
    # Rates from 1 to 16, in steps from 0.001 to 0.1.
    assert np.all(log_decay < -9e-4) and np.all(log_decay > -1.61)
    assert len(np.unique(log_decay)) > 3
    np.testing.assert_allclose(to_numpy(beta), 0.5)
    again = layer_class.from_config(layer.get_config())
    again.build(x.shape, x.shape)
    received, _ = again._rates(ops.zeros_like(x))
    np.testing.assert_array_equal(to_numpy(received), log_decay)


@pytest.mark.parametrize(
    ("layer_class", "least"), [(GatedDeltaAttention, 0), (KimiDeltaAttention, 1)]
)
def test_decays_begin_as_the_authors_have_them(layer_class, least):
    heads, x = 500, inputs()
    layer = layer_class(heads, 1, seed=1)
    layer.build(x.shape, x.shape)
    log_decay, beta = map(to_numpy, layer._rates(ops.convert_to_tensor(x)))
    rates = np.exp(to_numpy(layer._log_rate).ravel())
    steps = np.log1p(np.exp(to_numpy(layer._decay_bias).ravel()))
    # Rates are uniform from the least to 16, steps in the logarithm: their quantiles.
    quantiles = np.linspace(0, 1, 9)[1:-1]
    expected = least + (16 - least) * quantiles
    np.testing.assert_allclose(np.quantile(rates, quantiles), expected, atol=1.2)
    found = np.quantile(np.log10(steps), quantiles)
    np.testing.assert_allclose(found, -3 + 2 * quantiles, atol=0.15)
    # Inputs of variance 1 hardly move them yet.
    log_decay = log_decay.reshape(*x.shape[:2], heads)
    assert np.std(log_decay / (-rates * steps) - 1) < 0.1
    assert np.abs(beta - 0.5).max() < 0.1


@pytest.mark.parametrize("decay", ["vector", "scalar"])
def test_gated_linear_decays_begin_at_a_half_to_the_sixteenth(decay):
    layer, x = GatedLinearAttention(4, 8, decay=decay), inputs()
    layer.build(x.shape, x.shape)
    log_decay, _ = layer._rates(ops.convert_to_tensor(x))
    np.testing.assert_allclose(to_numpy(log_decay), np.log(0.5) / 16, rtol=0.05)


@keras.saving.register_keras_serializable("tests")
def halved(x):
    return x / 2


@pytest.mark.parametrize("gate", ["relu", halved])
def test_functions_of_gates_survive_the_configuration(gate):
    layer = DeltaAttention(2, 8, activation=ops.tanh, output_gate=gate)
    config = json.loads(json.dumps(layer.get_config()))
    assert (config["output_gate"]["activation"] == "relu") == (gate == "relu")
    x = inputs()
    again = DeltaAttention.from_config(config)
    for one in (layer, again):
        one.build(x.shape, x.shape)
    again.set_weights(layer.get_weights())
    outputs = [to_numpy(y(x, x, use_causal_mask=True)) for y in (again, layer)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("layer_class", "options", "message"),
    [
        (DeltaAttention, {"max_beta": 2.5}, "max_beta=2.5"),
        (DeltaAttention, {"max_beta": 0}, "max_beta=0"),
        (DeltaAttention, {"convolution": 1}, "convolution=1"),
        (DeltaAttention, {"activation": "nothing"}, "activation='nothing'"),
        (DeltaAttention, {"output_norm": "layer"}, "`output_norm`: .*kind='layer'"),
        (DeltaAttention, {"output_gate": "nothing"}, "activation='nothing'"),
        (
            DeltaAttention,
            {"output_gate": {"rank": 4}},
            "must have the field activation",
        ),
        (DeltaAttention, {"output_gate": keras.layers.PReLU()}, "without weights"),
        (DeltaAttention, {"window": 4}, "window=4"),
        (DeltaAttention, {"feature_map": "favor++"}, r"feature_map='favor\+\+'"),
        (GatedLinearAttention, {"decay": "matrix"}, "decay='matrix'"),
        (GatedLinearAttention, {"decay_rank": 0}, "decay_rank=0"),
        (GatedLinearAttention, {"decay_temperature": -1}, "decay_temperature=-1"),
        (KimiDeltaAttention, {"decay_rank": 0}, "decay_rank=0"),
        (RetentionAttention, {"decays": (0.5,)}, r"decays=\(0.5,\), num_heads=2"),
        (RetentionAttention, {"decays": (0.5, 1.5)}, r"decays=\(0.5, 1.5\)"),
        (RetentionAttention, {"rotary_wavelength": 0}, "rotary_wavelength=0"),
    ],
    ids=str,
)
def test_errors(layer_class, options, message):
    with pytest.raises(ValueError, match=message):
        layer_class(2, 8, **options)


def test_feature_maps_with_a_log_scale_are_refused():
    with pytest.raises(ValueError, match="`feature_map` must .* without a log"):
        DeltaAttention(2, 8, feature_map="favor+")(
            inputs(), inputs(), use_causal_mask=True
        )


@pytest.mark.parametrize("kind", ["product", "hedgehog", "relu", "dpfp"])
def test_projected_maps_equal_the_definition(kind):
    feature_map = feature_maps.get("projected", kind=kind, normalize_key=kind != "dpfp")
    layer = RetentionAttention(2, 4, feature_map=feature_map, rotary_wavelength=None)
    x = np.random.default_rng(0).normal(size=(2, 11, 6)).astype("float32")
    layer.build(x.shape, x.shape)
    random = np.random.default_rng(1)
    for weight in layer.trainable_weights:
        if "feature" in weight.name:
            weight.assign(np.abs(random.normal(size=weight.shape)) + 0.1)
    expected, _ = dense.layer_output(layer, dense.gated_heads, x, x, causal=True)
    received = to_numpy(layer(x, x, use_causal_mask=True))
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)
    again = RetentionAttention.from_config(layer.get_config())
    assert again.feature_map == feature_map


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_value_heads=3), "`num_value_heads` must be None or a multiple.*=3"),
        (
            dict(num_value_heads=4, num_key_value_heads=1),
            "`num_value_heads` must be None or a multiple.*num_key_value_heads=1",
        ),
        (dict(least_log_decay=1.0), "`least_log_decay` must be a number below 0.*=1.0"),
        (
            dict(output_norm={"kind": "rms", "epsilon": 0}),
            "`output_norm`: `epsilon` must be.*=0",
        ),
        (
            dict(output_gate={"activation": "silu", "rank": 0}),
            "`output_gate`: `rank` must be a positive.*=0",
        ),
        (dict(output_gate={"width": 3}), "has only the fields.*width=3"),
        (dict(qk_activation="none"), "`qk_activation` must name an activation.*'none'"),
        (dict(use_beta=1), "`use_beta` must be a boolean.*=1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_a_layer_cannot_have_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KimiDeltaAttention(2, 4, **options)


def test_the_normalizer_counts_existing_keys_only():
    """Features of a key of zeros are 1 with elu: not of masked or padded keys."""
    layer = GatedLinearAttention(
        2, 4, feature_map="elu", normalize=True, decay="scalar", chunk_size=8
    )
    x = np.random.default_rng(0).normal(size=(1, 13, 8)).astype("float32")
    mask = np.random.default_rng(1).random((1, 13)) > 0.3
    _, state = layer(
        x, x, key_mask=mask, use_causal_mask=True, state=layer.get_initial_state(1)
    )
    by_token = layer.get_initial_state(1)
    for t in np.flatnonzero(mask[0]):
        token = x[:, t : t + 1]
        _, by_token = layer(token, token, use_causal_mask=True, state=by_token)
    for name, received in state.items():
        np.testing.assert_allclose(
            to_numpy(received), to_numpy(by_token[name]), rtol=1e-5, atol=1e-5
        )
