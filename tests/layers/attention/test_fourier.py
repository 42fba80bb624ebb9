"""FourierAttention beyond the contract."""

import math

import numpy as np
import pytest

from keras_efficient_attn import FourierAttention
from keras_efficient_attn.layers.attention.base import AttentionCall
from tests import dense
from tests.autodiff import to_numpy
from tests.layers.streams import stream


def built(dim=8, **options):
    layer = FourierAttention(2, dim, seed=1, **options)
    layer.build((1, 6, 4), (1, 6, 4))
    return layer


@pytest.mark.parametrize("power", [2, 4, 8])
def test_the_first_radius_has_the_curvature_of_softmax(power):
    """exp(−‖q − k‖² / (2 √d)), up to fourth order in the difference."""
    layer = built(16, power=power)
    random = np.random.default_rng(0)
    query, key = (0.05 * random.normal(size=(1, 1, 2, 16)) for _ in range(2))
    radius = to_numpy(layer.radius).astype("float64")
    kernel = dense.fourier_kernel(query, key, radius, power)[0, :, 0, 0]
    squares = ((query - key) ** 2).sum(-1)[0, 0]
    np.testing.assert_allclose(-np.log(kernel), squares / (2 * 4), rtol=1e-3)


@pytest.mark.parametrize("dim", [4, 64, 256])
def test_no_weight_underflows_at_first_as_the_papers_radius_lets_it(dim):
    random = np.random.default_rng(0)
    query, key = (random.normal(size=(1, 20, 2, dim)) for _ in range(2))
    ours = to_numpy(built(dim).radius).astype("float64")
    assert dense.fourier_kernel(query, key, ours, 4).sum(-1).min() > 1e-8
    if dim >= 64:
        papers = dense.fourier_kernel(query, key, 2.0, 4)
        assert papers.sum(-1).max() < 1e-38


@pytest.mark.parametrize(
    ("sharing", "shape"), [("layer", ()), ("head", (2, 1)), ("dimension", (2, 8))]
)
def test_radius_is_positive_and_learned(sharing, shape):
    layer = built(radius_per=sharing, initial_radius=2)
    assert tuple(layer.radius.shape) == shape
    np.testing.assert_allclose(to_numpy(layer.radius), 2.0, rtol=1e-6)
    (weight,) = [w for w in layer.trainable_weights if w.name == "log_radius"]
    weight.assign(np.full(shape, -50.0))
    assert np.all(to_numpy(layer.radius) > 0)


def test_the_linear_form_is_near_the_exact_one():
    radius = 0.6 / math.sqrt(16)
    exact = built(16, initial_radius=radius)
    linear = built(16, initial_radius=radius, linear=True, num_frequencies=32)
    random = np.random.default_rng(0)
    shapes = [(1, 40, 2, 16)] * 2 + [(1, 40, 2, 3)]
    arrays = [random.normal(size=shape).astype("float32") for shape in shapes]
    for causal in (False, True):
        outputs = [
            to_numpy(layer.attend(*arrays, AttentionCall(causal=causal))[0])
            for layer in (exact, linear)
        ]
        error = np.linalg.norm(outputs[1] - outputs[0])
        assert 1e-4 < error / np.linalg.norm(outputs[0]) < 0.05


def test_the_linear_form_is_that_of_its_frequencies_and_streams():
    layer = built(linear=True, num_frequencies=4, power=2, chunk_size=2)
    x = np.random.default_rng(0).normal(size=(1, 9, 4)).astype("float32")
    mask = np.random.default_rng(1).random((1, 9)) > 0.3
    for causal in (False, True):
        output = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=causal))
        expected, _ = dense.layer_output(
            layer, dense.fourier_heads, x, x, key_mask=mask, causal=causal
        )
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    streamed, _ = stream(layer, x, (4, 1, 4), key_mask=mask)
    np.testing.assert_allclose(streamed, output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "fast"}, "implementation='fast'"),
        ({"linear": True, "implementation": "tiled"}, "linear=True"),
        ({"power": 3}, "power=3"),
        ({"radius_per": "token"}, "radius_per='token'"),
        ({"initial_radius": 0}, "initial_radius=0"),
        ({"initial_radius": math.inf}, "initial_radius=inf"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"num_frequencies": 8}, "num_frequencies=8"),
        ({"orthogonal": False}, "orthogonal=False"),
        ({"linear": True, "orthogonal": None}, "orthogonal=None"),
        ({"linear": "yes"}, "linear='yes'"),
        ({"linear": True, "num_frequencies": -1}, "num_frequencies=-1"),
        ({"linear": True, "num_frequencies": 91}, "16653 features"),
        ({"linear": True, "initial_radius": 2.0}, "inaccurate.*initial_radius=2.0"),
    ],
    ids=str,
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=message):
        FourierAttention(2, 16, **options)


def test_the_cache_has_the_length_that_it_is_given():
    state = built().get_initial_state(3, 5)
    assert tuple(state["key"].shape) == (3, 5, 2, 8)
    with pytest.raises(ValueError, match="max_length=None"):
        built().get_initial_state(3)
    linear = built(linear=True)
    assert tuple(linear.get_initial_state(3)["sum"].shape) == (3, 2, 8 * 17, 8)
