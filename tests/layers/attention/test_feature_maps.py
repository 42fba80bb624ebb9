"""Feature maps by name, of users, and with weights."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LinearAttention, PerformerAttention
from keras_efficient_attn.layers import (
    FeatureMap,
    feature_maps,
    register_feature_map,
)
from keras_efficient_attn.layers.attention.linear.layer import make_config
from keras_efficient_attn.ops.common.feature_kernels.choice import LinearAttentionConfig
from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention_with_feature_maps,
)
from tests import dense
from tests.autodiff import assert_slope, gradients, to_numpy
from tests.saving import assert_same_model, saved_and_loaded

DIM = 8
NAMES = (
    "favor+ hyperbolic favor++ trigonometric taylor power relu elu exp softmax "
    "hedgehog learned identity unit sum"
).split()
PROJECTED_RELU = feature_maps.get("relu", num_features=6, row_norm="sqrt_dim")


def inputs(length=19, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(2, length, 12)).astype("float32")


def built(**options):
    """A layer whose learned maps are not the identity."""
    layer = LinearAttention(2, DIM, chunk_size=4, **options)
    layer.build((2, 19, 12), (2, 19, 12))
    random = np.random.default_rng(3)
    for weight in layer.trainable_weights:
        if "feature" in weight.name:
            weight.assign(random.normal(size=weight.shape) * 0.5)
    return layer


@register_feature_map("leading")
@dataclasses.dataclass(frozen=True)
class Leading(feature_maps.FeatureMap):
    """The first coordinates: a map with an argument that has no default."""

    size: int

    def feature_dim(self, head_dim):
        return self.size

    def query_features(self, x):
        return ops.relu(x[..., : self.size]), None


def test_errors_name_maps_without_making_them():
    with pytest.raises(ValueError, match=r"that estimates exp.*one of favor\+"):
        LinearAttention(2, DIM, feature_map=Leading(3), window=4)
    with pytest.raises(ValueError, match=r"feature maps favor\+"):
        PerformerAttention(2, DIM, feature_map=Leading(3), calibrated=True)


def test_every_map_has_a_name_and_says_what_it_is():
    assert set(NAMES) <= set(feature_maps.names())
    for name in NAMES:
        feature_map = feature_maps.get(name)
        assert feature_map.name == name
        assert feature_map.estimates_softmax == (name in dense.ESTIMATES)
        assert feature_map.causal == (name != "favor++")
        signed = name in ("trigonometric", "identity", "unit", "sum")
        assert feature_map.positive == (not signed)
        again = feature_maps.get(name)
        assert again == feature_map and hash(again) == hash(feature_map)
        # The same object: JAX compiles once.
        layers = (LinearAttention(2, DIM, feature_map=m) for m in (again, feature_map))
        first, second = (layer._config(causal=False) for layer in layers)
        assert first is second


@pytest.mark.parametrize(
    "feature_map", [*NAMES, PROJECTED_RELU], ids=[*NAMES, "projected relu"]
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_maps_equal_the_dense_definition(feature_map, causal):
    if causal and feature_map == "favor++":
        pytest.skip("favor++ is not causal")
    # Weights of both signs may add up to nearly zero.
    normalize = feature_map not in ("identity", "unit", "sum")
    layer, x = built(feature_map=feature_map, normalize=normalize), inputs()
    mask = np.random.default_rng(1).random(x.shape[:2]) > 0.2
    hidden = np.where(mask[..., None], x, np.nan).astype("float32")
    output = to_numpy(layer(hidden, hidden, key_mask=mask, use_causal_mask=causal))
    expected, _ = dense.layer_output(
        layer, dense.linear_heads, x, x, key_mask=mask, causal=causal
    )
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)
    if feature_map == "favor++":
        return
    size = layer.feature_map.feature_dim(DIM)
    assert layer.get_initial_state(1)["sum"].shape == (1, 2, size, DIM)


@pytest.mark.parametrize("name", NAMES)
def test_maps_survive_configurations_of_keras(name):
    options = {"order": 4} if name in ("taylor", "power") else {}
    if name in ("favor+", "hyperbolic", "favor++", "trigonometric"):
        options = {"num_features": 6, "orthogonal": False, "row_norm": "sqrt_dim"}
    feature_map = feature_maps.get(name, **options)
    config = keras.saving.serialize_keras_object(feature_map)
    assert keras.saving.deserialize_keras_object(config) == feature_map
    layer = LinearAttention(2, DIM, feature_map=feature_map)
    again = LinearAttention.from_config(layer.get_config())
    assert again.feature_map == feature_map
    by_name = LinearAttention(2, DIM, feature_map=name)
    assert by_name.get_config()["feature_map"] == name


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("name", ["exp", "hedgehog", "learned", "softmax"])
def test_exponentials_neither_overflow_nor_vanish(name, scale):
    layer, x = built(feature_map=name), inputs(length=30)
    output = to_numpy(layer(scale * x, scale * x, use_causal_mask=True))
    assert np.all(np.isfinite(output))
    # The first query sees one key, whatever its weight.
    alone = to_numpy(layer(scale * x[:, :1], scale * x[:, :1]))
    np.testing.assert_allclose(output[:, :1], alone, rtol=1e-4, atol=1e-4 * scale)
    assert np.all(np.abs(alone).max(-1) > 0)


def test_hedgehog_begins_as_the_softmax_of_both_signs():
    layer, x = LinearAttention(2, DIM, feature_map="hedgehog"), inputs()
    output = to_numpy(layer(x, x))
    kernels = [w for w in layer.trainable_weights if "feature" in w.name]
    assert sorted(w.name for w in kernels) == [
        "key_feature_kernel",
        "query_feature_kernel",
    ]
    for kernel in kernels:
        np.testing.assert_array_equal(to_numpy(kernel), np.stack([np.eye(DIM)] * 2))

    def plain(x):
        both = ops.concatenate([x, -x], axis=-1)
        return ops.softmax(both, axis=-1)

    other = PerformerAttention(2, DIM, feature_map=plain, num_features=2 * DIM)
    other.build(x.shape, x.shape)
    projections = [w for w in layer.weights if "feature" not in w.name]
    other.set_weights([to_numpy(w) for w in projections])
    np.testing.assert_allclose(output, to_numpy(other(x, x)), rtol=1e-5, atol=1e-6)


def test_learned_features_begin_as_hyperbolic_ones():
    layer, x = LinearAttention(2, DIM, feature_map="learned", seed=1), inputs()
    layer.build(x.shape, x.shape)
    weights = {w.path.split("/")[-1]: to_numpy(w) for w in layer.weights}
    query, key = (weights[f"{side}_feature_kernel"] for side in ("query", "key"))
    np.testing.assert_array_equal(query, key)
    # Both signs of orthogonal rows.
    np.testing.assert_array_equal(query[..., DIM:], -query[..., :DIM])
    products = np.einsum("hdm,hdn->hmn", query[..., :DIM], query[..., :DIM])
    np.testing.assert_allclose(products[:, ~np.eye(DIM, dtype=bool)], 0, atol=1e-4)
    # Each head has its own rows.
    assert np.max(abs(query[0] - query[1])) > 0.1

    # With many features, the estimate is close to softmax attention.
    x = 0.3 * x
    many = feature_maps.get("learned", num_features=4096)
    layer = LinearAttention(2, DIM, feature_map=many, seed=1)
    exact = keras.layers.MultiHeadAttention(2, DIM)
    exact.build(x.shape, x.shape)
    layer.build(x.shape, x.shape)
    for ours, theirs in zip(
        (layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense),
        (exact.query_dense, exact.key_dense, exact.value_dense, exact.output_dense),
        strict=True,
    ):
        ours.set_weights(theirs.get_weights())
    expected = to_numpy(exact(x, x))
    error = np.linalg.norm(to_numpy(layer(x, x)) - expected)
    assert error < 0.1 * np.linalg.norm(expected)
    with pytest.raises(ValueError, match="even .* num_features=3"):
        feature_maps.get("learned", num_features=3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_of_a_map_s_weights_are_differences(causal):
    random = np.random.default_rng(3)
    query, key, value = random.normal(size=(3, 2, 9, 2, DIM)).astype("float32")
    config = LinearAttentionConfig(
        feature_maps.get("hedgehog").query_features,
        feature_maps.get("hedgehog").key_features,
        2 * DIM,
        causal=causal,
        chunk_size=4,
    )

    def loss(*kernels):
        (heads,), _ = linear_attention_with_feature_maps(
            (query, key, value), config, kernels
        )
        return ops.sum(ops.square(heads))

    def definition(*kernels):
        similarity = dense.hedgehog(query, key, *kernels)
        heads, _ = dense.weigh(similarity, value.astype("float64"), causal=causal)
        return (heads**2).sum()

    kernels = 0.5 * random.normal(size=(2, 2, DIM, DIM)).astype("float32")
    for i, gradient in enumerate(gradients(loss, *kernels)):
        assert_slope(gradient, definition, kernels, i, step=1e-4)


@register_feature_map("tests_gained_relu", package="tests")
@dataclasses.dataclass(frozen=True)
class GainedRelu(FeatureMap):
    """A user's map: a learned gain per head and channel."""

    epsilon: float = 1e-3

    def create_weights(self, layer, seed):
        shape = (layer.num_heads, 1, 1, layer.key_dim)
        return (layer.add_weight(shape, "ones", name="feature_gain"),)

    def query_features(self, x, gain):
        return ops.relu(x * gain) + self.epsilon, None

    def key_features(self, x, gain):
        return ops.relu(x) + self.epsilon, None


def test_a_map_from_outside_learns_and_is_saved(tmp_path, backend):
    layer = LinearAttention(2, DIM, feature_map="tests_gained_relu", chunk_size=4)
    sequence = keras.Input((None, 12))
    model = keras.Model(sequence, layer(sequence, sequence, use_causal_mask=True))
    (gain,) = (w for w in layer.trainable_weights if w.name == "feature_gain")
    assert gain.path.endswith("/feature_gain")
    x = inputs()
    # Initially it is "relu" without a projection.
    plain = LinearAttention(2, DIM, feature_map="relu")
    plain.build(x.shape, x.shape)
    plain.set_weights([to_numpy(w) for w in layer.weights if w is not gain])
    np.testing.assert_allclose(
        to_numpy(model(x)), to_numpy(plain(x, x, use_causal_mask=True)), atol=1e-5
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=backend != "torch")
    model.fit(x, x[..., :1] + np.zeros_like(x), epochs=2, verbose=0)
    assert np.all(to_numpy(gain) != 1.0)
    restored = saved_and_loaded(model, tmp_path)
    assert_same_model(restored, model, x)
    assert restored.layers[-1].feature_map == GainedRelu()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: feature_maps.get("rbf"), "feature_map='rbf'"),
        (lambda: feature_maps.get(3), "feature_map=3"),
        (lambda: feature_maps.get("elu", order=2), "order=2"),
        (lambda: feature_maps.get("favor+", num_features=0), "num_features=0"),
        (lambda: feature_maps.get("relu", orthogonal=False), "orthogonal=False"),
        (lambda: feature_maps.get(GainedRelu(), order=2), "order=2"),
        (lambda: feature_maps.get(keras.layers.Dense(2)), "not a Keras layer"),
        (
            lambda: register_feature_map("elu")(GainedRelu),
            "'elu' is taken by EluFeatures",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_argument_that_is_not_hashable_is_named():
    @dataclasses.dataclass(frozen=True)
    class Powers(FeatureMap):
        exponents: tuple

    assert feature_maps.get(Powers((1, 2))).exponents == (1, 2)
    with pytest.raises(TypeError, match=r"Powers with exponents=\[1, 2\]"):
        LinearAttention(2, 4, feature_map=Powers([1, 2]))


def test_what_is_kept_for_feature_maps_is_bounded():
    for order in range(2, 602, 2):
        make_config(feature_maps.PolynomialFeatures(order), DIM, True, None, True, None)
    kept = make_config.cache_info()
    assert kept.currsize == kept.maxsize < 300


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("elu", {}),
        ("exp", {}),
        ("relu", {}),
        ("relu", {"num_features": 6}),
        ("favor+", {"num_features": 6}),
        ("hyperbolic", {"num_features": 6}),
    ],
)
def test_entries_are_the_features(name, options):
    random, dim = np.random.default_rng(0), 16
    x = random.normal(size=(2, 5, dim)).astype("float32")
    feature_map = feature_maps.get(name, **options)
    weights = ()
    if options:
        rows = feature_map.num_rows(dim)
        weights = (ops.convert_to_tensor(random.normal(size=(rows, dim)), "float32"),)
    entry, rows, log_scale = feature_map.entrywise(ops.convert_to_tensor(x), *weights)
    products = x if rows is None else x @ to_numpy(rows).T
    entries = {
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(x)),
        "exp": np.exp,
        "relu": lambda x: np.maximum(x, 0) + 1e-3,
    }
    received = entries[entry](products)
    if log_scale is not None:
        received = received * np.exp(to_numpy(log_scale))[..., None]
    features, scale = feature_map.query_features(ops.convert_to_tensor(x), *weights)
    expected = to_numpy(features)
    if scale is not None:
        expected = expected * np.exp(to_numpy(scale))[..., None]
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-6)


def test_entries_are_not_inherited_without_the_features():
    elu = type(feature_maps.get("elu"))

    class Doubled(elu):
        def query_features(self, x):
            return 2 * super().query_features(x)[0], None

    assert Doubled().entrywise is None
    assert elu().entrywise is not None
