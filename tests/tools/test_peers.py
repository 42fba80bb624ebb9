"""Public packages as attention layers: they compute what they are compared as."""

import importlib
import importlib.util

import keras
import numpy as np
import pytest

from keras_efficient_attn.benchmark import cli
from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.benchmark.workloads import build_workload
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.layers.attention import registry
from keras_efficient_attn.layers.attention.base import AttentionCall
from tests.autodiff import to_numpy

HEADS, HEAD_DIM, LENGTH = 2, 16, 256
NAMES = (
    "performer-pytorch",
    "local-attention",
    "reformer-pytorch",
    "flash-linear-attention",
)


@pytest.fixture(scope="module", autouse=True)
def peers():
    """The module; other tests do not meet the layers that it registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_LAYERS", dict(registry._LAYERS))
        yield importlib.import_module("tools.peers")


@pytest.fixture
def make():
    """Callable from a name to the layer, if its package is here."""

    def run(name):
        if keras.backend.backend() != "torch":
            pytest.skip("the packages run on PyTorch")
        pytest.importorskip(registry.attention_class(name).module)
        return get_attention(name, num_heads=HEADS, key_dim=HEAD_DIM)

    return run


def heads_of(layer, causal):
    """Random query, key, value `(batch, length, heads, head_dim)`, and its output."""
    shape = (1, LENGTH, HEADS, HEAD_DIM)
    query, key, value = (keras.random.normal(shape) for _ in range(3))
    heads, _ = layer.attend(query, key, value, AttentionCall(causal=causal))
    return query, key, value, to_numpy(heads)


def distance(heads, weights, value, causal):
    """Relative distance from the mean of values by these weights, in float64.

    Args:
        heads: `(batch, length, heads, head_dim)`, the layer's.
        weights: `(batch, heads, length, length)`, at least 0.
        value: `(batch, length, heads, head_dim)`.
        causal: Whether query `t` sees keys `0..t` only.
    """
    weights = np.tril(weights) if causal else weights
    weights = weights / weights.sum(-1, keepdims=True)
    expected = np.einsum("bhts,bshd->bthd", weights, to_numpy(value))
    return np.linalg.norm(heads - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("causal", [False, True])
def test_local_attention_is_softmax_over_near_blocks(make, peers, causal):
    query, key, value, heads = heads_of(make("local-attention"), causal)
    scores = np.einsum("bthd,bshd->bhts", to_numpy(query), to_numpy(key))
    block = np.arange(LENGTH) // peers.WINDOW
    seen = abs(block[:, None] - block) <= 1
    weights = np.exp(scores / HEAD_DIM**0.5) * seen
    assert distance(heads, weights, value, causal) < 1e-5


# Of the sums of keys, the package adds 1e-6 if causal: a percent of the small ones.
@pytest.mark.parametrize("causal, tolerance", [(False, 1e-4), (True, 0.1)])
def test_performer_is_linear_attention_of_its_features(make, causal, tolerance):
    layer = make("performer-pytorch")
    query, key, value, heads = heads_of(layer, causal)
    # The package adds 1e-4 to each feature, so that they differ from FAVOR+'s.
    features = layer.package_attention(causal)
    softmax_kernel = importlib.import_module(
        "performer_pytorch.performer_pytorch"
    ).softmax_kernel
    query, key = (
        to_numpy(
            softmax_kernel(
                x.transpose(1, 2),
                projection_matrix=features.projection_matrix,
                is_query=is_query,
            )
        )
        for x, is_query in ((query, True), (key, False))
    )
    weights = np.einsum("bhtm,bhsm->bhts", query, key, dtype="float64")
    assert distance(heads, weights, value, causal) < tolerance


@pytest.mark.parametrize(
    "name, weights",
    [("performer-pytorch", 8), ("local-attention", 8), ("reformer-pytorch", 6)],
)
def test_peers_give_the_gradients_of_every_weight(make, name, weights):
    make(name)
    settings = Settings(
        [name], heads=HEADS, head_dim=HEAD_DIM, mode="train", causal=True
    )
    workload = build_workload(settings.task(name, LENGTH))
    results = workload.program(*workload.make_inputs(np.random.default_rng(0)))
    assert len(results) == 2 + weights
    assert all(float(abs(result).sum()) > 0 for result in results[:2])


@pytest.mark.parametrize("name", NAMES)
def test_peers_have_no_states_and_no_masks(make, name):
    layer = make(name)
    with pytest.raises(ValueError, match="has no state: call it"):
        layer.get_initial_state(1, LENGTH)
    x = keras.random.normal((1, LENGTH, HEADS * HEAD_DIM))
    with pytest.raises(ValueError, match="has no masks"):
        layer(x, x, key_mask=np.arange(LENGTH)[None] < 3)


@pytest.mark.any_backend
@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_is_not_installed_gets_one_line(monkeypatch, capsys, name):
    found = importlib.util.find_spec
    module = registry.attention_class(name).module
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda asked: None if asked == module else found(asked),
    )
    arguments = ["--import", "tools.peers", "--backend", "torch", "--layers", name]
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"pip install {name}" in captured.err


@pytest.mark.any_backend
def test_another_backend_is_refused(monkeypatch):
    if keras.backend.backend() == "torch":
        monkeypatch.setattr("tools.peers.BACKEND", "jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    layer = get_attention("local-attention", num_heads=HEADS, key_dim=HEAD_DIM)
    with pytest.raises(ValueError, match="needs PyTorch"):
        layer.build((1, LENGTH, 8), (1, LENGTH, 8))
