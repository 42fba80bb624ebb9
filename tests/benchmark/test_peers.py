import keras
import numpy as np
import pytest

from keras_efficient_attn.benchmark.peers import PEERS, available_peers
from keras_efficient_attn.benchmark.settings import Settings
from keras_efficient_attn.benchmark.workloads import build_workload


def peer_workload(name, **options):
    if keras.backend.backend() != "torch":
        pytest.skip("peers run on PyTorch")
    pytest.importorskip(PEERS[name])
    settings = Settings(layers=["softmax"], heads=2, head_dim=16, peers=True, **options)
    return build_workload(settings.task(name, 256))


@pytest.mark.parametrize(
    "name, causal, tolerance",
    [
        ("local-attention", False, 1e-5),
        ("local-attention", True, 1e-5),
        ("performer-pytorch", False, 1e-4),
        ("performer-pytorch", True, 0.1),
    ],
)
def test_peers_compute_what_they_are_compared_as(name, causal, tolerance):
    workload = peer_workload(name, causal=causal)
    assert workload.difference(np.random.default_rng(0)) < tolerance


@pytest.mark.parametrize(
    "name, weights", [("local-attention", 8), ("reformer-pytorch", 6)]
)
def test_peers_give_the_gradients_of_every_weight(name, weights):
    workload = peer_workload(name, mode="train", causal=True)
    results = workload.program(*workload.make_inputs(np.random.default_rng(0)))
    assert len(results) == 2 + weights
    assert all(float(abs(result).sum()) > 0 for result in results[:2])


@pytest.mark.parametrize("mode, model", [("decode", False), ("train", True)])
def test_peers_take_no_part_where_they_have_no_counterpart(mode, model):
    names, absent = available_peers(mode, model)
    assert names == [] and list(absent) == list(PEERS)
