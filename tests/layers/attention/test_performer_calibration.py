"""PerformerAttention calibrated to trained queries and keys."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import PerformerAttention
from keras_efficient_attn.layers.attention.linear.calibration import (
    balanced_coordinates,
    sampling_variance,
    worth_seeing,
)
from tests import dense
from tests.autodiff import to_numpy
from tests.layers.streams import stream
from tests.saving import assert_same_model, saved_and_loaded

BATCH, LENGTH, DIM, HEADS, KEY_DIM = 2, 21, 12, 2, 8
MAPS = {
    "favor+": {"num_features": 16},
    "hyperbolic": {"num_features": 16, "qk_norm": True, "rotary_wavelength": 50.0},
    "power": {"rank": 3, "temperature": 2.0},
    "taylor": {},
}


def inputs(length=LENGTH):
    return np.random.default_rng(1).normal(size=(BATCH, length, DIM)).astype("float32")


def make(feature_map="favor+", calibrated=True, **options):
    """A layer whose queries and keys have means and correlated coordinates."""
    options = {**MAPS[feature_map], "window": 4, "chunk_size": 4, **options}
    layer = PerformerAttention(
        HEADS, KEY_DIM, feature_map=feature_map, calibrated=calibrated, **options
    )
    layer.build((None, None, DIM), (None, None, DIM))
    random = np.random.default_rng(0)
    for weight in layer.trainable_weights:
        weight.assign(random.normal(size=weight.shape) * 0.4)
    return layer


def calibration(layer, name):
    (weight,) = [
        weight
        for weight in layer.non_trainable_weights
        if weight.path.endswith(f"calibration/{name}")
    ]
    return to_numpy(weight).astype("float64")


def scaled(layer, query, key):
    """Queries and keys for exp(q·k)."""
    if layer.qk_norm:
        query, key = dense.rms(query), dense.rms(key)
    if layer.rotary_wavelength is not None:
        query, key = (dense.rotate(t, layer.rotary_wavelength) for t in (query, key))
    scale = KEY_DIM**-0.25 * layer.temperature**-0.5
    return query * scale, key * scale


def similarity(layer, query, key):
    """The estimate of `exp((q − mean)·(k − mean))`, times the key's exact factor."""
    to_query, to_key = calibration(layer, "query_map"), calibration(layer, "key_map")
    query = np.einsum("bthd,hde->bthe", query, to_query)
    key = key - calibration(layer, "key_center")
    key = np.einsum("bthd,hde->bthe", key, to_key)
    mean = calibration(layer, "query_center")
    unseen = calibration(layer, "unseen_variance")
    known = np.exp((mean * key).sum(-1) + 0.5 * (unseen * key**2).sum(-1))
    known = np.moveaxis(known, 1, 2)[:, :, None]
    exact, centred = np.exp(dense.dots(query, key)), query - mean
    if layer.feature_map.name in ("taylor", "power"):
        rank = layer.rank or KEY_DIM
        estimate = dense.KERNELS[layer.feature_map.name](
            centred[..., :rank], key[..., :rank], None, 2
        )
        return estimate * known, exact
    seen, shape = calibration(layer, "seen"), calibration(layer, "shape")
    (rows,) = [w for w in layer.non_trainable_weights if w.name == "projection"]
    rows = to_numpy(rows).astype("float64")
    if layer.feature_map.name == "hyperbolic":
        rows = np.concatenate([rows, -rows])
    # Drawn from N(0, 1 - 4A), weighted by the ratio of the densities.
    variance = 1.0 - 4.0 * shape
    drawn = rows * np.sqrt(variance)[:, None]
    log_ratio = -0.5 * (drawn**2 - rows**2 - np.log(variance)[:, None]).sum(-1)

    def features(x):
        x = x * seen
        exponents = np.einsum("bthd,hmd->bthm", x, drawn)
        return np.exp(exponents - dense.squared_norm(x) / 2 + log_ratio / 2)

    return dense.dots(features(centred), features(key)) / len(rows) * known, exact


def calibrated_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    estimate, exact = similarity(layer, *scaled(layer, query, key))
    distance = np.subtract.outer(np.arange(query.shape[1]), np.arange(key.shape[1]))
    weights = np.where(abs(distance) < layer.window, exact, estimate)
    return dense.weigh(weights, value, key_mask, causal)


@pytest.mark.parametrize("feature_map", ["favor+", "hyperbolic", "power"])
def test_calibrated_layer_equals_the_dense_definition_and_streams(feature_map):
    layer, x = make(feature_map), inputs()
    layer.calibrate(2.0 * x)
    mask = np.arange(LENGTH) < np.linspace(LENGTH // 2, LENGTH, BATCH)[:, None]
    # Masked positions are not read.
    hidden = np.where(mask[..., None], x, np.nan).astype("float32")
    for causal in (False, True):
        expected, _ = dense.layer_output(
            layer, calibrated_heads, x, x, key_mask=mask, causal=causal
        )
        output = to_numpy(layer(hidden, hidden, key_mask=mask, use_causal_mask=causal))
        np.testing.assert_allclose(output, expected, rtol=1e-3, atol=2e-4)

    whole = to_numpy(layer(x, x, use_causal_mask=True))
    streamed, _ = stream(layer, x, (7, 1, LENGTH - 8))
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-4)
    changed = x.copy()
    changed[:, -1] *= 9.0
    again = to_numpy(layer(changed, changed, use_causal_mask=True))
    np.testing.assert_array_equal(again[:, :-1], whole[:, :-1])


@pytest.mark.parametrize("feature_map", ["hyperbolic", "power"])
def test_a_window_over_everything_is_softmax_attention(feature_map):
    """Holds for any calibration, which does not change the kernel."""
    options = {"rotary_wavelength": None, "qk_norm": False, "temperature": 1.0}
    fitted = make(feature_map, **options)
    layer = make(feature_map, window=LENGTH, **options)
    theirs = keras.layers.MultiHeadAttention(HEADS, KEY_DIM)
    x = inputs()
    theirs.build(x.shape, x.shape)
    theirs.set_weights([to_numpy(w) for w in layer.trainable_weights])
    fitted.calibrate(3.0 * x + 1.0)
    layer.set_weights(fitted.get_weights())
    np.testing.assert_allclose(
        to_numpy(layer(x, x)), to_numpy(theirs(x, x)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("feature_map", ["favor+", "hyperbolic", "taylor"])
def test_until_calibrated_the_layer_is_the_plain_one(feature_map):
    layer = make(feature_map, seed=3)
    plain = make(feature_map, calibrated=False, seed=3)
    x = inputs()
    np.testing.assert_allclose(
        to_numpy(layer(x, x, use_causal_mask=True)),
        to_numpy(plain(x, x, use_causal_mask=True)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("feature_map", ["favor+", "power"])
def test_calibration_lessens_the_error_against_softmax(feature_map):
    random = np.random.default_rng(4)
    x = (0.5 * random.normal(size=(2, 60, DIM)) + 1.0).astype("float32")
    options = {"num_features": 64} if feature_map == "favor+" else {"rank": None}
    errors = []
    for seed in range(4):
        layer = make(feature_map, window=None, seed=seed, **options)
        exact = make(feature_map, window=60, seed=seed, **options)
        expected = to_numpy(exact(x, x))
        before = np.square(to_numpy(layer(x, x)) - expected).mean()
        layer.calibrate(x)
        after = np.square(to_numpy(layer(x, x)) - expected).mean()
        errors.append((before, after))
    before, after = np.mean(errors, 0)
    assert after < 0.5 * before


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_calibrate_weighs_pairs_by_far_attention(window, causal):
    x = inputs()
    mask = np.arange(LENGTH) < np.array([[LENGTH], [9]])
    hidden = np.where(mask[..., None], x, np.nan).astype("float32")
    layer = make("power", window=window, rotary_wavelength=None)
    batches = [(hidden[:1], mask[:1]), (hidden[1:], mask[1:])]
    spread = layer.calibrate(batches, use_causal_mask=causal)

    sides = layer.query_dense(x), layer.key_dense(x)
    query, key = scaled(layer, *(to_numpy(side).astype("float64") for side in sides))
    attention = np.exp(dense.dots(query, key)) * mask[:, None, None]
    distance = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    if causal:
        attention = attention * (distance >= 0)
    attention = attention / attention.sum(-1, keepdims=True) * mask[:, None, :, None]
    if window is not None:
        attention = attention * (abs(distance) >= window)
    for head in range(HEADS):
        weights = attention[:, head]
        share = [weights.sum(axis).ravel() / weights.sum() for axis in (2, 1)]
        sides = [side[:, :, head].reshape(-1, KEY_DIM) for side in (query, key)]
        means = [p @ side for p, side in zip(share, sides, strict=True)]
        np.testing.assert_allclose(
            calibration(layer, "key_center")[head], means[1], rtol=1e-3, atol=1e-4
        )
        logits = (sides[0] - means[0]) @ (sides[1] - means[1]).T
        expected = np.sqrt(share[0] @ logits**2 @ share[1])
        np.testing.assert_allclose(spread[head], expected, rtol=1e-3)
    # The same queries, passed separately.
    again = layer.calibrate(batches, query=batches, use_causal_mask=causal)
    np.testing.assert_allclose(again, spread, rtol=1e-6)


def test_calibrate_ignores_what_is_not_finite():
    x = inputs()
    mask = np.arange(LENGTH) % 3 > 0
    mask = np.stack([mask, ~mask])
    broken = np.where(mask[..., None], x, np.inf).astype("float32")
    expected, received = make("power"), make("power")
    received.set_weights(expected.get_weights())
    np.testing.assert_allclose(
        received.calibrate(broken), expected.calibrate([(x, mask)]), rtol=1e-6
    )
    for pair in zip(received.weights, expected.weights, strict=True):
        np.testing.assert_allclose(*map(to_numpy, pair), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_calibration_is_saved_and_compiles(tmp_path, dtype):
    sequence = keras.Input((None, DIM))
    layer = PerformerAttention(
        4,
        KEY_DIM,
        num_key_value_heads=2,
        feature_map="hyperbolic",
        num_features=16,
        window=3,
        calibrated=True,
        dtype=dtype,
    )
    model = keras.Model(sequence, layer(sequence, sequence))
    x = inputs()
    before = to_numpy(ops.cast(model(x), "float32"))
    assert layer.calibrate(x).shape == (4,)
    after = to_numpy(ops.cast(model(x), "float32"))
    assert np.abs(after - before).max() > 1e-3
    restored = saved_and_loaded(model, tmp_path)
    if dtype == "float32":
        assert_same_model(restored, model, x)
        np.testing.assert_allclose(
            model.predict(x, verbose=0), after, rtol=1e-3, atol=1e-4
        )
    fitted = [w for w in layer.weights if "calibration/" in w.path]
    assert len(fitted) == 7
    assert all(w.dtype == "float32" for w in fitted)


def test_balanced_coordinates():
    random = np.random.default_rng(0)
    mixing = random.normal(size=(2, 3, 5, 5)) * np.array([4.0, 2.0, 1.0, 0.5, 0.1])
    covariances = mixing @ np.swapaxes(mixing, -1, -2)
    query_map, key_map, variance = balanced_coordinates(*covariances)
    identity = np.broadcast_to(np.eye(5), (3, 5, 5))
    np.testing.assert_allclose(
        query_map @ np.swapaxes(key_map, 1, 2), identity, atol=1e-6
    )
    for one, matrix in zip((query_map, key_map), covariances, strict=True):
        found = np.swapaxes(one, 1, 2) @ matrix @ one
        np.testing.assert_allclose(found, variance[..., None] * identity, atol=0.03)
    # In any coordinates, E (q·k)² is the trace of the product.
    product = np.trace(covariances[0] @ covariances[1], axis1=1, axis2=2)
    np.testing.assert_allclose((variance**2).sum(-1), product, rtol=1e-3)
    assert np.all(np.diff(variance) <= 0)


def test_sampling_variance_has_the_least_second_moment():
    s = np.linspace(0.7, 30.0, 20_000)
    for variance in (0.0, 0.3, 2.0, 10.0):
        # The second moment of N(0, 1)² / N(0, s) e^{2ωv}, by the expectation of its
        # logarithm; v² is twice the variance.
        moment = 0.5 * np.log(s / (2 - 1 / s)) + 2 * variance / (2 * s - 1)
        best = s[moment.argmin()]
        np.testing.assert_allclose(sampling_variance(variance), best, atol=0.002)


def test_coordinates_worth_seeing():
    variance = np.array([[3.0, 0.5, 0.3, 0.01, 0.001], [0.01, 0.01, 0.01, 0.01, 0.01]])
    few, many = (worth_seeing(variance, features) for features in (16, 10**6))
    assert few[:, 0].all()
    assert np.all(few.sum(-1) <= many.sum(-1))
    assert 1 <= few[0].sum() < 4
    assert many[0].sum() >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "elu"}, "feature_map='elu'"),
        ({"feature_map": "favor++"}, "feature_map='favor\\+\\+'"),
        ({"normalize": False}, "normalize=False"),
        ({"rank": 3}, "rank=3"),
        ({"rank": 9, "feature_map": "power"}, "rank=9, key_dim=8"),
        ({"rank": 0, "feature_map": "power"}, "rank=0"),
        ({"rank": 3, "feature_map": "power", "calibrated": False}, "calibrated=False"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerAttention(2, 8, **{"calibrated": True, **options})


def test_calibrate_errors():
    x = inputs()
    with pytest.raises(ValueError, match="calibrated=True, built=False"):
        PerformerAttention(2, 8, calibrated=True).calibrate(x)
    with pytest.raises(ValueError, match="calibrated=False, built=True"):
        make(calibrated=False).calibrate(x)
    layer = make()
    with pytest.raises(ValueError, match="beyond the window.*window=4"):
        layer.calibrate([])
    with pytest.raises(ValueError, match="beyond the window.*window=4"):
        layer.calibrate(x[:, :4])
    with pytest.raises(ValueError, match="as many batches as `data`. Received: fewer"):
        layer.calibrate(x, query=[])
    with pytest.raises(ValueError, match=r"batch of `data`.*mask of shape \(2, 3\)"):
        layer.calibrate([(x, np.ones((2, 3)))])
