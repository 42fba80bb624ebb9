"""Linear attention with a decay or a correction by flash-linear-attention."""

import sys
import types

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("the package is for PyTorch", allow_module_level=True)

import torch

from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.ops import linear_attention, linear_attention_state
from keras_efficient_attn.ops.common import derivatives_torch
from keras_efficient_attn.ops.common.documents import Documents
from keras_efficient_attn.ops.common.feature_kernels import choice
from keras_efficient_attn.ops.common.plan import plan_for
from keras_efficient_attn.ops.linear_attention.gated.api import (
    gated_attention_with_feature_maps,
)
from tests.autodiff import to_numpy
from tests.ops.test_gated_attention import RULES, poison, recurrence

BATCH, LENGTH, HEADS, FEATURES, VALUE_DIM = 2, 21, 2, 16, 32
# Version 0.6.0: the rates that each function takes beside `q`, `k` and `v`.
ARGUMENTS = {
    "simple_gla": {"g"},
    "gla": {"g"},
    "delta_rule": {"beta"},
    "gated_delta_rule": {"g", "beta"},
    "kda": {"g", "beta"},
}
LAYERS = {
    "retention": "simple_gla",
    "gated-linear": "gla",
    "delta": "delta_rule",
    "gated-delta": "gated_delta_rule",
    "kimi-delta": "kda",
}


def position_by_position(q, k, v, g, beta, state):
    """`(output, state)` of one sequence without an axis for the batch, in float32."""
    output = []
    for t in range(q.shape[0]):
        key, new = k[t].float(), v[t].float()
        if g is not None:
            decay = g[t].exp()
            state = state * decay.reshape(*decay.shape, *[1] * (3 - decay.ndim))
        if beta is not None:
            old = torch.einsum("hk,hkv->hv", key, state)
            new = beta[t, :, None] * (new - old)
        state = state + key[..., None] * new[:, None]
        output.append(torch.einsum("hk,hkv->hv", q[t].float(), state))
    return torch.stack(output), state


@pytest.fixture
def package(monkeypatch):
    """A fake of the package's functions; a list of the names of those called."""
    called = []

    def fake(name):
        def chunk(
            q,
            k,
            v,
            *,
            scale=None,
            initial_state=None,
            output_final_state=False,
            cu_seqlens=None,
            **rates,
        ):
            called.append(name)
            assert set(rates) == ARGUMENTS[name]
            assert scale == 1.0
            assert q.shape == k.shape and q.shape[:3] == v.shape[:3]
            assert q.dtype == k.dtype == v.dtype == torch.bfloat16
            g, beta = rates.get("g"), rates.get("beta")
            by_feature = name in ("gla", "kda")
            assert g is None or g.shape == (q.shape if by_feature else q.shape[:3])
            assert beta is None or beta.shape == q.shape[:3]
            batch, length, heads, features = q.shape
            parts = [(row, 0, length) for row in range(batch)]
            if cu_seqlens is not None:
                assert batch == 1 and cu_seqlens.dtype == torch.long
                bounds = cu_seqlens.tolist()
                assert bounds[0] == 0 and bounds[-1] == length
                parts = [(0, *pair) for pair in zip(bounds, bounds[1:], strict=False)]
            outputs, states = [], []
            for index, (row, start, stop) in enumerate(parts):
                state = torch.zeros(heads, features, v.shape[-1])
                if initial_state is not None:
                    assert initial_state.dtype == torch.float32
                    state = initial_state[index]
                given = (
                    x if x is None else x[row, start:stop] for x in (q, k, v, g, beta)
                )
                output, state = position_by_position(*given, state)
                outputs.append(output)
                states.append(state)
            output = torch.cat(outputs).reshape(v.shape).to(q.dtype)
            return output, torch.stack(states) if output_final_state else None

        return chunk

    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ARGUMENTS:
        module = types.SimpleNamespace(**{f"chunk_{name}": fake(name)})
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    monkeypatch.setattr(choice, "has_kernels", lambda query: True)
    monkeypatch.setattr(choice, "_torch_obstacle", lambda *_: None)
    with plan_for("gpu"):
        yield called


def draw(rule, length=LENGTH):
    """`[query, key, value, log_decay, beta]` with half precision's digits."""
    decays, corrects = rule
    random = np.random.default_rng(0)
    shape = (BATCH, length, HEADS)
    query, key = random.normal(size=(2, *shape, FEATURES))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(*shape, VALUE_DIM))
    log_decay = -random.gamma(0.3, size=(*shape, FEATURES))
    if decays != "vector":
        log_decay = log_decay[..., 0] if decays else None
    beta = random.uniform(0, 2, size=shape) if corrects else None
    rounded = [to_numpy(torch.tensor(x).bfloat16().float()) for x in (query, key)]
    rounded.append(to_numpy(torch.tensor(value).bfloat16().float()))
    rates = [x if x is None else x.astype("float32") for x in (log_decay, beta)]
    return [*rounded, *rates]


def attend(query, key, value, log_decay, beta, **options):
    """The operation of `value` in bfloat16."""
    return linear_attention(
        query,
        key,
        torch.tensor(value).bfloat16(),
        causal=True,
        log_decay=log_decay,
        beta=beta,
        normalize=False,
        **options,
    )


def distance(received, expected):
    received = to_numpy(received.float()) if torch.is_tensor(received) else received
    return np.linalg.norm(received - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_outputs_and_states_are_those_of_the_recurrence(package, rule):
    tensors = draw(rule)
    mask = np.random.default_rng(3).random((BATCH, LENGTH)) > 0.3
    state = linear_attention_state(BATCH, HEADS, FEATURES, VALUE_DIM)
    outputs = []
    for part in (slice(0, 12), slice(12, LENGTH)):
        given = [x if x is None else x[:, part] for x in poison(tensors, mask)]
        output, state = attend(*given, key_mask=mask[:, part], state=state)
        outputs.append(output)
    assert len(package) == 2
    expected, sums = recurrence(*tensors, mask)
    # The outputs are rounded to 8 bits.
    assert distance(torch.cat(outputs, 1), expected) < 4e-3
    assert distance(state["sum"], sums) < 1e-5
    # A single position is read from the state.
    attend(*(x if x is None else x[:, :1] for x in tensors), state=state)
    assert len(package) == 2


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_documents_do_not_see_one_another(package, rule):
    query, key, value, *rates = draw(rule)
    ids = np.array([[0] * 5 + [1] * 16, [0] * 12 + [3] + [1] * 8])
    config = choice.features_config(FEATURES, causal=True, normalize=False)
    output, _ = gated_attention_with_feature_maps(
        (query, key, torch.tensor(value).bfloat16()),
        rates,
        config,
        documents=Documents.of(torch.tensor(ids)),
    )
    assert len(package) == 1
    expected = np.zeros(value.shape)
    tensors = query, key, value, *rates
    for row in range(BATCH):
        for number in np.unique(ids[row]):
            own = ids[row] == number
            part = (x if x is None else x[row : row + 1, own] for x in tensors)
            expected[row, own] = recurrence(*part)[0][0]
    assert distance(output, expected) < 4e-3


def test_gradients_are_those_of_chunks_and_first_ones_only(package):
    *tensors, beta = draw(("vector", True))
    results = []
    for implementation in ("fla", "chunked"):
        own = [torch.tensor(x).requires_grad_() for x in (*tensors, beta)]
        query, key, value, *rates = own
        output = linear_attention(
            query,
            key,
            value.bfloat16(),
            causal=True,
            log_decay=rates[0],
            beta=rates[1],
            normalize=False,
            implementation=implementation,
        )
        loss = output.float().square().sum()
        results.append(torch.autograd.grad(loss, own, retain_graph=True))
        with pytest.raises(NotImplementedError, match="Second derivatives"):
            torch.autograd.grad(loss, own, create_graph=True)
    assert package == ["kda"]
    for one, other in zip(*results, strict=True):
        assert distance(one, to_numpy(other)) < 0.02


def test_a_tensor_without_a_gradient_needs_no_refusal():
    derivatives_torch.first_derivatives_only(None, torch.ones(2))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_half_precision_use_it(package, monkeypatch, name):
    layer = get_attention(name, num_heads=2, key_dim=16, dtype="mixed_bfloat16")
    x = np.random.default_rng(0).normal(size=(2, 37, 32)).astype("float32")
    mask = np.ones((2, 37), "bool")
    mask[0, 30:] = mask[1, :4] = False
    ids = np.where(np.arange(37) < [[20], [11]], 1, 2)
    options = dict(key_mask=mask, query_mask=mask, document_ids=ids)
    received = layer(x, x, use_causal_mask=True, **options)
    assert package == [LAYERS[name]]
    monkeypatch.setattr(choice, "has_kernels", lambda query: False)
    expected = layer(x, x, use_causal_mask=True, **options)
    assert package == [LAYERS[name]]
    assert distance(received, to_numpy(expected.float())) < 0.02


class Tensor(types.SimpleNamespace):
    """What the choice reads of a tensor."""

    @classmethod
    def of(cls, dtype="bfloat16", dim=64, device="cuda"):
        return cls(
            shape=(1, 100, 2, dim),
            dtype=dtype,
            is_cuda=device == "cuda",
            device=torch.device(device),
        )


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of compute capability 9.0, and the package."""
    properties = types.SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(choice.HAS_PACKAGE, "fla", True)
    return properties


def choose(value=None, head_dim=64, query=None, **options):
    config = choice.features_config(head_dim, causal=True, normalize=False)
    value = value or Tensor.of()
    query = query or Tensor.of("float32", head_dim, value.device.type)
    changed = choice.dataclasses.replace(config, **options)
    return choice.choose_gated_kernel(query, query, value, None, changed) == "fla"


def test_it_is_chosen_for_half_precision_on_a_gpu(gpu):
    assert choose()
    assert choose(Tensor.of("float16"))
    assert choose(implementation="fla")
    assert not choose(implementation="chunked")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(value=Tensor.of("float32")), "float32"),
        (dict(value=Tensor.of("float64")), "float64"),
        (dict(query=Tensor.of("float64")), "float64"),
        (dict(value=Tensor.of(device="cpu")), "CUDA device. Received: cpu"),
        (dict(value=Tensor.of(dim=40)), "multiples of 16"),
        (dict(head_dim=8), "multiples of 16"),
        (dict(head_dim=272), "at most 256 features"),
        (dict(chunk_size=64), "chunk_size=64"),
        (dict(output="normalized"), "normalize=True"),
    ],
    ids=str,
)
def test_what_it_cannot_compute_has_chunks(gpu, options, reason):
    assert not choose(**options)
    with pytest.raises(ValueError, match=reason):
        choose(**options, implementation="fla")


def test_without_the_package_or_on_an_old_gpu_there_are_chunks(gpu, monkeypatch):
    gpu.major = 7
    assert not choose()
    gpu.major = 9
    monkeypatch.setitem(choice.HAS_PACKAGE, "fla", False)
    assert not choose()
    with pytest.raises(ValueError, match="needs the package flash-linear-attention"):
        choose(implementation="fla")


def test_a_compiled_program_has_chunks(gpu, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not choose()
    assert choose(implementation="fla")


@pytest.mark.skipif(
    not choice.HAS_PACKAGE["fla"] or not torch.cuda.is_available(),
    reason="flash-linear-attention needs a GPU",
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_package_computes_the_same(rule):
    query, key, value, *rates = draw(rule, length=150)
    mask = np.random.default_rng(3).random((BATCH, 150)) > 0.3
    results = []
    for implementation in ("fla", "chunked"):
        own = [
            x if x is None else torch.tensor(x).cuda().requires_grad_()
            for x in (query, key, value, *rates)
        ]
        output, state = linear_attention(
            *own[:2],
            own[2].bfloat16(),
            causal=True,
            key_mask=torch.tensor(mask).cuda(),
            log_decay=own[3],
            beta=own[4],
            normalize=False,
            state=linear_attention_state(BATCH, HEADS, FEATURES, VALUE_DIM),
            implementation=implementation,
        )
        loss = output.float().square().sum() + state["sum"].square().sum()
        given = [x for x in own if x is not None]
        gradients = torch.autograd.grad(loss, given)
        results.append([output, state["sum"], *gradients])
    for one, other in zip(*results, strict=True):
        one, other = (to_numpy(x.detach().float().cpu()) for x in (one, other))
        assert distance(one, other) < 0.02
