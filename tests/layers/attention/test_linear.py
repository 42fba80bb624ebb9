"""LinearAttention: arguments, windows, and one position at a time."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LinearAttention, PerformerAttention
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.layers.attention.base import AttentionCall
from tests import dense
from tests.autodiff import gradient_function, to_numpy
from tests.layers.streams import stream

DIM = 8
LENGTH = 23
LAYERS = {
    "elu": (LinearAttention, {}),
    "exp": (LinearAttention, {"feature_map": "exp"}),
    "hedgehog": (LinearAttention, {"feature_map": "hedgehog"}),
    "sum": (LinearAttention, {"normalize": False}),
    "rotary": (LinearAttention, {"rotary_wavelength": 50.0, "qk_norm": True}),
    "favor+": (PerformerAttention, {"num_features": 16}),
    "power": (LinearAttention, {"feature_map": "power"}),
    "window": (PerformerAttention, {"num_features": 16, "window": 4}),
    "window of one": (LinearAttention, {"feature_map": "taylor", "window": 1}),
    "long window": (LinearAttention, {"feature_map": "power", "window": 40}),
    "calibrated": (
        PerformerAttention,
        {"feature_map": "power", "rank": 3, "window": 4, "calibrated": True},
    ),
}


def inputs(seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(2, LENGTH, 12)).astype("float32")


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_and_segments_give_the_definition(name):
    layer_class, options = LAYERS[name]
    layer = layer_class(2, DIM, chunk_size=4, **options)
    x = inputs()
    layer.build(x.shape, x.shape)
    # The first keys and a run of others are hidden.
    mask = np.random.default_rng(1).random((2, LENGTH)) > 0.3
    mask[0, :3] = mask[1, 9:15] = False
    hidden = np.where(mask[..., None], x, np.nan).astype("float32")
    if name == "calibrated":
        layer.calibrate(inputs(seed=1))
        whole = to_numpy(layer(x, hidden, key_mask=mask, use_causal_mask=True))
    else:
        whole, _ = dense.layer_output(
            layer, dense.linear_heads, x, x, key_mask=mask, causal=True
        )
    # From segments to tokens and back: both use the same state.
    for sizes in ((1,) * LENGTH, (7, 1, 1, 1, 8, 5), (1, 1, 1, 17, 3)):
        output, _ = stream(layer, x, sizes, key_mask=mask)
        np.testing.assert_allclose(output, whole, rtol=1e-3, atol=2e-4)


def test_elu_is_the_default_and_the_name_is_linear():
    layer = get_attention("linear", num_heads=2, key_dim=DIM)
    assert type(layer) is LinearAttention
    assert layer.feature_map.name == "elu"
    performer = PerformerAttention(2, DIM, feature_map="elu")
    x = inputs()
    layer.build(x.shape, x.shape)
    performer.build(x.shape, x.shape)
    performer.set_weights(layer.get_weights())
    np.testing.assert_array_equal(to_numpy(layer(x, x)), to_numpy(performer(x, x)))


@pytest.mark.parametrize("name", ["performer", "local", "vq:num_codes=4"])
@pytest.mark.parametrize("length", [1, 6])
def test_a_state_of_another_window_is_refused(name, length):
    near, far = (
        get_attention(name, num_heads=2, key_dim=4, window=window) for window in (3, 5)
    )
    x = np.ones((2, length, 6), "float32")
    for layer in (near, far):
        layer.build(x.shape, x.shape)
    state = near.get_initial_state(2)
    with pytest.raises(ValueError, match=r"with the same options.*shape=\(2, [23],"):
        far(x, x, use_causal_mask=True, state=state)


def test_a_map_without_a_causal_form_has_no_state():
    layer = PerformerAttention(2, 4, feature_map="favor++")
    with pytest.raises(ValueError, match="has no state: call it"):
        layer.get_initial_state(2)


def test_sliding_window_of_keras_is_the_window():
    layer = LinearAttention(2, DIM, feature_map="power", sliding_window=5)
    assert layer.window == 5
    assert LinearAttention.from_config(layer.get_config()).window == 5


@pytest.mark.parametrize("name", ["performer", "vq:num_codes=4"])
@pytest.mark.parametrize("window", [3, None])
def test_a_window_that_is_set_later_is_saved(name, window):
    layer = get_attention(name, num_heads=2, key_dim=4, sliding_window=5)
    # As in the window search of `convert_backbone`.
    layer.window = window
    assert type(layer).from_config(layer.get_config()).window == window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, "window=4, .*feature_map='elu'"),
        ({"sliding_window": 4}, "sliding_window=4, feature_map='elu'"),
        (
            {"feature_map": "power", "window": 3, "sliding_window": 4},
            "sliding_window=4, window=3",
        ),
        ({"window": 0}, "window=0"),
        ({"temperature": 0}, "temperature=0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"normalize": "no"}, "normalize='no'"),
        ({"qk_norm": 1}, "qk_norm=1"),
        ({"feature_map": "rbf"}, "feature_map='rbf'"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LinearAttention(2, DIM, **options)


def log_elu(x):
    return np.where(x > 0, np.log1p(np.maximum(x, 0)), x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("key_dim", [1, 8, 32])
def test_elu_sees_keys_at_any_scale(key_dim, scale, causal):
    """Against the definition in logarithms, which do not underflow."""
    random = np.random.default_rng(0)
    query, key = scale * random.normal(size=(2, 1, 40, 2, key_dim))
    value, upstream = random.normal(size=(2, 1, 40, 2, 3))
    logs = log_elu(query[:, :, None]) + log_elu(key[:, None])
    logs = np.moveaxis(np.logaddexp.reduce(logs, axis=-1), -1, 1)
    if causal:
        logs = np.where(np.tri(40, dtype=bool), logs, -np.inf)
    largest = logs.max(-1, keepdims=True)
    weights = np.exp(logs - largest)
    weights /= weights.sum(-1, keepdims=True)
    layer = LinearAttention(2, key_dim, chunk_size=16)
    layer.build((1, 40, 4), (1, 40, 4))

    def attend(*heads):
        return layer.attend(*heads, AttentionCall(causal=causal))[0]

    arrays = [x.astype("float32") for x in (query, key, value)]
    output = to_numpy(attend(*arrays))
    assert np.all(np.abs(output).max(-1) > 1e-3)
    # Features have a lower bound beside the largest of their vector.
    exact = np.swapaxes(largest[..., 0] > (-np.inf if key_dim == 1 else -10), 1, 2)
    assert exact.mean() > 0.9
    expected = np.einsum("bhts,bshv->bthv", weights, value)
    np.testing.assert_allclose(output[exact], expected[exact], rtol=1e-3, atol=1e-4)

    upstream = (upstream * exact[..., None]).astype("float32")
    *_, grad_value = gradients = gradient_function(
        lambda *heads: ops.sum(attend(*heads) * ops.convert_to_tensor(upstream))
    )(*arrays)
    expected = np.einsum("bhts,bthv->bshv", weights, upstream)
    np.testing.assert_allclose(grad_value, expected, rtol=1e-3, atol=1e-4)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("key_dim", [1, 32])
def test_elu_streams_at_any_scale(key_dim):
    layer = LinearAttention(2, key_dim)
    x, mask = 300 * inputs(), np.ones((2, LENGTH), bool)
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    outputs, _ = stream(layer, x, (1,) * LENGTH, key_mask=mask)
    np.testing.assert_allclose(outputs, whole, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("normalize", [False, True])
def test_gates_take_elu_at_any_width(normalize):
    layer = get_attention(
        "gated-linear", num_heads=2, key_dim=4, feature_map="elu", normalize=normalize
    )
    output = to_numpy(layer(300 * inputs(), 300 * inputs(), use_causal_mask=True))
    assert np.isfinite(output).all()
    if normalize:
        assert np.abs(output).max(-1).min() > 1e-3
