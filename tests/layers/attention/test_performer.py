"""Maps, estimates and projections of PerformerAttention."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import PerformerAttention
from keras_efficient_attn.layers.attention.base import AttentionCall
from keras_efficient_attn.ops.common import random_features
from keras_efficient_attn.ops.common.plan import plan_for
from keras_efficient_attn.ops.linear_attention import feature_maps
from tests import dense
from tests.autodiff import gradients, to_numpy
from tests.largest_tensor import temporary_bytes
from tests.saving import assert_same_model, saved_and_loaded

DIM = 8


def estimates(function, query, key, **options):
    """A feature map's estimate of the kernel, `(queries, keys)`, in float64."""

    def full(x):
        features, log_scale = function(ops.convert_to_tensor(x), **options)
        features = to_numpy(features).astype("float64")
        if log_scale is None:
            return features
        return features * np.exp(to_numpy(log_scale).astype("float64"))[..., None]

    return full(query) @ full(key).T


def vectors(count, size, seed=0):
    random = np.random.default_rng(seed)
    return (random.normal(size=(count, DIM)) * size).astype("float32")


def projection(features, seed, **options):
    draws = random_features.gaussian_blocks(features, DIM, seed)
    return random_features.random_projection(*draws, **options)


def relative_errors(function, features, draws=60, **options):
    query, key = vectors(1, 0.35), vectors(1, 0.35, seed=1)
    exact = np.exp(query @ key.T)
    rows = [
        estimates(
            function, query, key, projection=projection(features, seed, **options)
        )
        for seed in range(draws)
    ]
    return np.concatenate(rows).ravel() / exact.item() - 1, query + key


def test_favor_has_the_variance_of_its_formula():
    for features in (16, 64):
        errors, both = relative_errors(
            feature_maps.positive_random_features, features, 400, orthogonal=False
        )
        predicted = math.sqrt((math.exp((both**2).sum()) - 1) / features)
        assert abs(errors.mean()) < 4 * predicted / math.sqrt(len(errors))
        assert 0.7 * predicted < np.sqrt((errors**2).mean()) < 1.4 * predicted


def test_orthogonal_rows_are_orthogonal_and_no_worse():
    rows = to_numpy(projection(2 * DIM + 3, 5))
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for block in (unit[:DIM], unit[DIM : 2 * DIM]):
        np.testing.assert_allclose(block @ block.T, np.eye(DIM), atol=1e-5)
    fixed = to_numpy(projection(DIM, 5, row_norm="sqrt_dim"))
    np.testing.assert_allclose((fixed**2).sum(1), DIM, rtol=1e-5)
    independent, _ = relative_errors(
        feature_maps.positive_random_features, DIM, 300, orthogonal=False
    )
    orthogonal, _ = relative_errors(feature_maps.positive_random_features, DIM, 300)
    assert (orthogonal**2).mean() < 1.1 * (independent**2).mean()


def test_rows_are_standard_normal():
    rows = np.concatenate([to_numpy(projection(DIM, seed)) for seed in range(150)])
    assert abs(rows.mean()) < 0.05
    np.testing.assert_allclose(np.cov(rows.T), np.eye(DIM), atol=0.2)


@pytest.mark.parametrize(
    "function",
    [
        feature_maps.trigonometric_features,
        lambda x, projection: feature_maps.positive_random_features(
            x, projection, hyperbolic=True
        ),
        lambda x, projection: feature_maps.optimal_positive_features(
            x, projection, ops.convert_to_tensor([-0.2])
        ),
        lambda x, projection: feature_maps.optimal_positive_features(
            x, projection, ops.linspace(-0.4, 0.1, DIM), hyperbolic=True
        ),
    ],
    ids=["trigonometric", "hyperbolic", "favor++", "favor++ by coordinate"],
)
def test_the_other_random_maps_are_unbiased(function):
    errors, _ = relative_errors(function, 64, 200, orthogonal=False)
    assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(len(errors))
    assert errors.std() < 0.5


def test_favor_plus_plus_has_less_variance_than_favor_plus():
    query, key = vectors(40, 0.8), vectors(40, 0.8, seed=1)
    shape = feature_maps.optimal_shape(
        ops.convert_to_tensor(query[None, :, None]),
        ops.convert_to_tensor(key[None, :, None]),
    )
    log_errors = {"favor+": [], "favor++": []}
    for seed in range(40):
        rows = projection(64, seed, orthogonal=False)
        plus = estimates(
            feature_maps.positive_random_features, query, key, projection=rows
        )
        optimal = estimates(
            feature_maps.optimal_positive_features,
            query,
            key,
            projection=rows,
            shape=shape[0],
        )
        exact = np.exp(query @ key.T)
        log_errors["favor+"].append((plus / exact - 1) ** 2)
        log_errors["favor++"].append((optimal / exact - 1) ** 2)
    means = {k: np.log(np.mean(v, axis=0)).mean() for k, v in log_errors.items()}
    assert means["favor++"] < means["favor+"]


def test_error_against_softmax_falls_with_the_root_of_the_features():
    random = np.random.default_rng(0)
    x = (random.normal(size=(1, 40, 16)) * 0.5).astype("float32")

    def error(features):
        total = 0.0
        for seed in range(8):
            keras.utils.set_random_seed(3)
            layer = PerformerAttention(2, DIM, num_features=features, seed=seed)
            layer.build(x.shape, x.shape)
            heads = [to_numpy(dense_(x)) for dense_ in projections(layer)]
            scaled = [head.astype("float64") * DIM**-0.25 for head in heads[:2]]
            exact, _ = dense.weigh(np.exp(dense.dots(*scaled)), heads[2])
            ours, _ = layer.attend(*map(ops.convert_to_tensor, heads), AttentionCall())
            total += ((to_numpy(ours) - exact) ** 2).mean()
        return math.sqrt(total / 8)

    errors = [error(features) for features in (16, 64, 256)]
    slope = np.polyfit(np.log([16, 64, 256]), np.log(errors), 1)[0]
    assert -0.65 < slope < -0.35


def projections(layer):
    return layer.query_dense, layer.key_dense, layer.value_dense


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["taylor", "power"])
def test_polynomial_maps_equal_their_closed_form(kind, order):
    function = getattr(feature_maps, f"{kind}_features")
    query, key = vectors(9, 1.0), vectors(11, 1.0, seed=1)
    features, _ = function(ops.convert_to_tensor(query), order=order)
    assert features.shape[-1] == math.comb(DIM + order, order)
    x = query.astype("float64") @ key.T
    closed = {
        "taylor": sum(x**i / math.factorial(i) for i in range(order + 1)),
        "power": (1 + x / order) ** order,
    }[kind]
    ours = estimates(function, query, key, order=order)
    np.testing.assert_allclose(ours, closed, rtol=1e-4, atol=1e-4)
    # The log scale, not the features, holds the scale.
    features, log_scale = function(ops.convert_to_tensor(1e9 * query), order=order)
    assert np.all(np.isfinite(to_numpy(features)))
    assert np.all(np.isfinite(to_numpy(log_scale)))


def test_taylor_is_positive_everywhere():
    query, key = vectors(50, 3.0), vectors(50, 3.0, seed=1)
    ours = estimates(feature_maps.taylor_features, query, key, order=2)
    assert np.all(ours > 0)
    assert (query @ key.T).min() < -10


@pytest.mark.parametrize("window", [1, 3, 64, 200])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_window_is_one_softmax_with_exact_near_weights(window, causal):
    options = dict(num_features=16, window=window, chunk_size=16)
    layer = PerformerAttention(2, DIM, **options)
    x = np.random.default_rng(0).normal(size=(1, 150, 12)).astype("float32")
    mask = np.random.default_rng(1).random((1, 150)) > 0.2
    output = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=causal))
    expected, _ = dense.layer_output(
        layer, dense.linear_heads, x, x, key_mask=mask, causal=causal
    )
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_tpu_computes_the_window_by_its_kernel(causal, backend):
    if backend != "jax":
        pytest.skip("only JAX can plan for a TPU")
    layer = PerformerAttention(2, DIM, num_features=16, window=9)
    x = np.random.default_rng(0).normal(size=(1, 150, 12)).astype("float32")
    mask = np.random.default_rng(1).random((1, 150)) > 0.2
    weight = np.random.default_rng(2).normal(size=x.shape).astype("float32")

    def loss(x):
        output = layer(x, x, key_mask=mask, use_causal_mask=causal)
        return ops.sum(ops.multiply(output, weight)), output

    layer.build(x.shape, x.shape)
    chunked = gradients(lambda x: loss(x)[0], x)
    with plan_for("tpu"):
        assert "splash_mha_fwd" in traced(lambda x: loss(x)[1], x)
        output = to_numpy(loss(x)[1])
        received = gradients(lambda x: loss(x)[0], x)
    expected, _ = dense.layer_output(
        layer, dense.linear_heads, x, x, key_mask=mask, causal=causal
    )
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(received[0], chunked[0], rtol=1e-3, atol=1e-4)


def traced(function, x):
    """The program of a function, as text."""
    import jax

    return str(jax.make_jaxpr(function)(x))


def test_redraw_counts_training_calls_and_survives_saving(tmp_path):
    layer = PerformerAttention(1, 4, num_features=8, redraw_interval=2, seed=0)
    sequence = keras.Input((None, 6))
    model = keras.Model(sequence, layer(sequence, sequence))
    x = np.ones((1, 5, 6), "float32")

    def current():
        return to_numpy(layer._projection)

    drawn = [current()]
    for training in (True, True, False, False, True, True, True, True):
        model(x, training=training)
        drawn.append(current())
    changed = [not np.array_equal(a, b) for a, b in zip(drawn, drawn[1:], strict=False)]
    assert changed == [False, False, False, False, True, False, True, False]
    # Each draw is new, and orthogonal like the first.
    assert len({drawn[i].tobytes() for i in (0, 5, 7)}) == 3
    unit = drawn[7] / np.linalg.norm(drawn[7], axis=1, keepdims=True)
    np.testing.assert_allclose(unit[:4] @ unit[:4].T, np.eye(4), atol=1e-5)

    restored = saved_and_loaded(model, tmp_path)
    assert_same_model(restored, model, x)
    # The count is also restored: the next redraw is due at the next training call.
    (again,) = (x for x in restored.layers if isinstance(x, PerformerAttention))
    restored(x, training=True)
    assert not np.array_equal(to_numpy(again._projection), drawn[7])

    layer.trainable = False
    before = current()
    for _ in range(4):
        model(x, training=True)
    np.testing.assert_array_equal(current(), before)
    layer.redraw()
    assert not np.array_equal(current(), before)


def test_redraw_inside_a_compiled_fit(backend):
    layer = PerformerAttention(1, 4, num_features=8, redraw_interval=3, seed=0)
    sequence = keras.Input((None, 6))
    model = keras.Model(sequence, layer(sequence, sequence))
    model.compile("sgd", "mse", jit_compile=backend != "torch")
    x = np.ones((4, 5, 6), "float32")
    first = to_numpy(layer._projection)
    model.fit(x, x, batch_size=2, epochs=1, verbose=0)
    np.testing.assert_array_equal(to_numpy(layer._projection), first)
    model.fit(x, x, batch_size=2, epochs=1, verbose=0)
    assert not np.array_equal(to_numpy(layer._projection), first)
    assert int(to_numpy(layer._calls_since_redraw)) == 1


def test_memory_of_the_compiled_program_is_linear_in_the_length(backend):
    if backend != "jax":
        pytest.skip("reads the size of XLA's temporaries")
    import jax

    layer = PerformerAttention(2, 16, num_features=512)
    layer.build((1, 64, 16), (1, 64, 16))

    def temporaries(length, causal):
        def loss(x):
            return ops.sum(layer(x, x, use_causal_mask=causal))

        return temporary_bytes(jax.grad(loss), np.ones((1, length, 16), "float32"))

    for causal in (False, True):
        short, long = temporaries(8192, causal), temporaries(32768, causal)
        assert long < 4.5 * short
        # One array of features for all positions would have this size, and the
        # attention matrix 64 times this size.
        assert long < 32768 * 2 * 512 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "rbf"}, "feature_map='rbf'"),
        ({"num_features": 0}, "num_features=0"),
        ({"orthogonal": "no"}, "orthogonal='no'"),
        ({"calibrated": 1}, "calibrated=1"),
        ({"num_features": 7, "feature_map": "hyperbolic"}, "num_features=7"),
        ({"num_features": 7, "feature_map": "elu"}, "num_features=7"),
        ({"order": 2}, "order=2"),
        ({"order": 3, "feature_map": "taylor"}, "order=3"),
        ({"order": 4, "feature_map": "taylor", "key_dim": 64}, "814385 features"),
        ({"row_norm": "l2"}, "row_norm='l2'"),
        ({"redraw_interval": 5, "feature_map": "elu"}, "redraw_interval=5"),
        ({"redraw_interval": 0}, "redraw_interval=0"),
        ({"window": 0}, "window=0"),
        ({"window": 4, "feature_map": "elu"}, "feature_map='elu'"),
        ({"temperature": 0}, "temperature=0"),
        ({"rotary_wavelength": -1.0}, "rotary_wavelength=-1.0"),
        ({"rotary_wavelength": 10.0, "key_dim": 5}, "key_dim=5"),
        ({"chunk_size": 1.5}, "chunk_size=1.5"),
        ({"orthogonal": False, "feature_map": "elu"}, "orthogonal=False"),
        ({"feature_map": keras.layers.Dense(3)}, "not a Keras layer"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerAttention(**{"num_heads": 2, "key_dim": 8, **options})


def twice(x):
    return ops.concatenate([x, x], axis=-1)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_visible_keys_never_underflow_to_nothing(scale):
    """Features of vectors this far apart have no large component in common."""
    random = np.random.default_rng(0)
    heads = [
        ops.convert_to_tensor(
            (random.normal(size=(1, 50, 2, 16)) * s).astype("float32")
        )
        for s in (scale, scale, 1.0)
    ]
    layer = PerformerAttention(2, 16, num_features=32)
    layer.build((1, 50, 8), (1, 50, 8))
    output, _ = layer.attend(*heads, AttentionCall(causal=True))
    output, value = to_numpy(output), to_numpy(heads[2])
    # The first query sees one key, whatever its weight.
    np.testing.assert_allclose(output[:, 0], value[:, 0], rtol=1e-4)
    assert np.all(np.abs(output).max(-1) > 0)


def test_call_errors():
    x = np.ones((1, 4, 6), "float32")
    optimal = PerformerAttention(1, 4, feature_map="favor++")
    with pytest.raises(ValueError, match="has no causal form"):
        optimal(x, x, use_causal_mask=True)
    symbolic = keras.KerasTensor((None, None, 6))
    with pytest.raises(ValueError, match="has no causal form"):
        optimal(symbolic, symbolic, use_causal_mask=True)
    with pytest.raises(ValueError, match="must give `num_features=4`"):
        PerformerAttention(1, 4, feature_map=twice)(x, x)
    with pytest.raises(ValueError, match="feature_map='elu', built=False"):
        PerformerAttention(1, 4, feature_map="elu").redraw()
