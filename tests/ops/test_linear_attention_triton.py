"""The kernels for NVIDIA GPUs, run by Triton's interpreter where there is none."""

import dataclasses
import functools
import sys
import types

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("the Triton kernels are PyTorch's", allow_module_level=True)
pytest.importorskip("triton")

import torch

from keras_efficient_attn import LinearAttention, PerformerAttention
from keras_efficient_attn.ops import linear_attention, linear_attention_state
from keras_efficient_attn.ops.common.feature_kernels import (
    choice,
    triton,
    triton_op,
)
from keras_efficient_attn.ops.common.plan import has_kernels
from keras_efficient_attn.ops.linear_attention import feature_maps
from tests.autodiff import to_numpy
from tests.largest_tensor import largest_tensor
from tests.ops import linear_attention_cases
from tests.ops.linear_attention_cases import (
    Case,
    assert_close,
    check_pieces,
    favor,
    weighed_sum,
)

ONE_HEAD = {"batch": 1, "heads": 1}
# Interpreting programs one by one is slow: use one row and few tiles.
CASES = {
    name: dataclasses.replace(
        case,
        **ONE_HEAD,
        length=min(case.length, 70),
        key_length=case.key_length and min(case.key_length, 90),
        dims=(min(case.dims[0], 32), case.dims[1]),
    )
    for name, case in linear_attention_cases.CASES.items()
    if name != "lanes"
} | {
    "exp": Case(feature_maps.exponential_features, masked=True, length=40, **ONE_HEAD),
    "blocks": Case(length=30, weighted=True, dims=(40, 40), **ONE_HEAD),
    "batch": Case(length=30, with_state=True),
}


@pytest.fixture(autouse=True)
def device():
    """The kernels are compiled where there is a GPU and `TRITON_INTERPRET=0`."""
    with keras.ops.zeros(1).device as device:
        yield device.type


def outputs_and_gradients(function, arrays, constant=("log_scale", "projection")):
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    trained = [name for name in tensors if name not in constant]
    for name in trained:
        tensors[name].requires_grad_()
    outputs = function(tensors)
    gradients = torch.autograd.grad(
        weighed_sum(outputs), [tensors[name] for name in trained]
    )
    named = {str(i): x.detach() for i, x in enumerate(outputs)}
    return named | dict(zip(trained, gradients, strict=True))


def check(case, **constant):
    """Checks the kernels against the definition in float64; hidden keys are NaN."""
    arrays, mask = case.draw()
    wide = {name: x.astype("float64") for name, x in arrays.items()}
    correct = outputs_and_gradients(
        lambda x: case.definition(x, mask), wide, **constant
    )
    assert correct["0"].dtype == torch.float64
    if mask is not None:
        for name in ("key", "value"):
            arrays[name][~mask] = np.nan
    received = outputs_and_gradients(
        lambda x: case.fast(x, mask, "triton"), arrays, **constant
    )
    assert_close(received, correct)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_the_reference(case):
    check(case)


def test_a_trained_projection_has_its_gradient():
    check(favor(length=40, **ONE_HEAD), constant=("log_scale",))


def test_a_segment_may_have_several_chunks(monkeypatch):
    monkeypatch.setattr(triton_op, "CHUNK", 32)
    monkeypatch.setattr(triton_op, "STATE_FLOATS", 1)
    monkeypatch.setattr(triton_op, "MOST_CHUNKS", 2)
    check(Case(length=140, masked=True, weighted=True, with_state=True, **ONE_HEAD))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(length=80), "bfloat16"),
        (favor(length=70), "bfloat16"),
        (Case(length=80), "float16"),
    ],
)
def test_narrow_floats_are_added_up_in_float32(case, dtype):
    case = dataclasses.replace(case, dtype=dtype, **ONE_HEAD)
    arrays, _ = case.draw()
    for name in ("query", "key", "value"):
        rounded = torch.tensor(arrays[name], dtype=getattr(torch, dtype))
        arrays[name] = to_numpy(rounded.float())
    correct = outputs_and_gradients(lambda x: case.definition(x, None), arrays)
    received = outputs_and_gradients(lambda x: case.fast(x, None, "triton"), arrays)
    assert received["0"].dtype == getattr(torch, dtype)
    # The interpreter truncates where a GPU rounds.
    most = 0.02 if dtype == "bfloat16" else 0.002
    for name, expected in correct.items():
        error = (received[name].float() - expected).square().mean()
        assert torch.sqrt(error / expected.square().mean()) < most, name


def test_the_past_does_not_depend_on_the_future():
    case = favor(length=100, **ONE_HEAD)
    arrays, _ = case.draw()

    def attend():
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        return case.fast(tensors, None, "triton")[0]

    first = attend()
    for name in ("query", "key", "value"):
        arrays[name][:, 70:] = 1e3 * arrays[name][:, 70:] + 1
    second = attend()
    assert torch.equal(first[:, :70], second[:, :70])
    assert torch.all(first[:, 70:] != second[:, 70:])


def test_no_memory_is_read_that_was_not_written():
    # New memory is NaN then.
    torch.use_deterministic_algorithms(True)
    try:
        check(favor(length=66, dims=(4, 3), masked=True, **ONE_HEAD))
    finally:
        torch.use_deterministic_algorithms(False)


def test_features_never_reach_memory():
    case = favor(rows=64, dims=(4, 3), length=30, **ONE_HEAD)
    arrays, _ = case.draw()

    def loss(x):
        inputs = dict(arrays, query=x, key=x, value=x[..., :3])
        return weighed_sum(case.fast(inputs, None, "triton"))

    assert largest_tensor(loss, arrays["query"]) < 30 * 64


def test_torch_compile_makes_one_graph():
    x = torch.rand(1, 70, 2, 8, requires_grad=True)
    mask = torch.arange(70)[None] > 5

    def attend(x):
        return linear_attention(
            x, x, x, key_mask=mask, causal=True, implementation="triton"
        )

    expected = attend(x)
    (correct,) = torch.autograd.grad(expected.square().sum(), x)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    output = compiled(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradient, correct)


def test_the_operation_is_as_it_declares():
    tensors = torch.rand(3, 1, 20, 1, 4, requires_grad=True)
    inputs = (*tensors.unbind(), None, torch.zeros(1, 1, 20), None, None)
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    for output in ("normalized", "partial"):
        arguments = (*inputs, f"elu {output}")
        torch.library.opcheck(
            triton_op.linear_attention_op, arguments, test_utils=tests
        )


def test_autocast_changes_nothing(device):
    case = favor(length=20, **ONE_HEAD)
    arrays, _ = case.draw()
    expected = outputs_and_gradients(lambda x: case.fast(x, None, "triton"), arrays)
    with torch.autocast(device, torch.bfloat16):
        received = outputs_and_gradients(lambda x: case.fast(x, None, "triton"), arrays)
    assert received["0"].dtype == torch.float32
    for name, x in expected.items():
        assert torch.equal(received[name], x), name


@pytest.mark.parametrize(
    "layer",
    [LinearAttention(2, 8), PerformerAttention(2, 8, num_features=32)],
    ids=["linear", "performer"],
)
def test_layers_take_the_kernel_of_the_device(layer, monkeypatch):
    x = torch.randn(1, 40, 16)
    arguments = dict(use_causal_mask=True, value_mask=torch.arange(40)[None] < 30)
    expected = layer(x, x, **arguments)
    rows = []

    def spy(*arguments):
        rows.append(arguments[3])
        return triton_op.linear_attention_op(*arguments)

    monkeypatch.setattr(triton, "linear_attention_op", spy)
    monkeypatch.setattr(choice, "has_kernels", lambda query: True)
    torch.testing.assert_close(layer(x, x, **arguments), expected)
    assert [x is not None for x in rows] == [isinstance(layer, PerformerAttention)]


def test_the_device_chooses():
    x = torch.rand(1, 4, 2, 8, device="cpu")
    assert not has_kernels(x) and not has_kernels(x.to("meta"))

    class OnCuda:
        is_cuda = True

    assert has_kernels(OnCuda())


def test_one_position_and_a_state_need_no_kernel(monkeypatch):
    monkeypatch.setattr(triton, "linear_attention_op", None)
    x, state = torch.rand(1, 1, 2, 8), linear_attention_state(1, 2, 8, 8)
    output, _ = linear_attention(
        x, x, x, causal=True, state=state, implementation="triton"
    )
    torch.testing.assert_close(output, x)


def test_a_state_goes_through_the_operation():
    check_pieces("triton")


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 4, 2, 8), "float64", "Received: float64"),
        ((1, 4, 2, 1025), "float32", "at most 512"),
        ((0, 4, 2, 8), "float32", "known in advance"),
    ],
)
def test_errors(shape, dtype, message):
    x = torch.ones(shape, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match=message):
        linear_attention(x, x, x, causal=True, implementation="triton")


def test_what_is_missing_is_named(monkeypatch):
    x = torch.ones(1, 4, 2, 8)
    with pytest.raises(ValueError, match="needs causal=True. Received: causal=False"):
        linear_attention(x, x, x, implementation="triton")
    attend = functools.partial(linear_attention, x, x, x, causal=True)
    with pytest.raises(ValueError, match="Received: chunk_size=2"):
        attend(chunk_size=2, implementation="triton")
    monkeypatch.setattr(choice, "_interprets", lambda: False)
    with keras.device("cpu"):
        x = x.cpu()
        with pytest.raises(ValueError, match="CUDA device. Received: cpu"):
            linear_attention(x, x, x, causal=True, implementation="triton")
    monkeypatch.setattr(choice, "HAS_PACKAGE", {"triton": False, "fla": False})
    for name, package in (("triton", "triton"), ("fla", "flash-linear-attention")):
        with pytest.raises(ValueError, match=f"needs the package {package}"):
            attend(implementation=name)


@pytest.mark.parametrize(
    "case",
    [
        Case(length=20, dims=(16, 5), masked=True, with_state=True),
        Case(length=20, dims=(16, 5), key_length=12, output="sum"),
        Case(length=20, dims=(16, 5), output="partial", dtype="bfloat16"),
    ],
    ids=["state", "sum", "partial"],
)
def test_sums_of_flash_linear_attention_are_completed(case, monkeypatch):
    """Uses a fake with the same arguments and results."""

    def chunk_simple_gla(q, k, v, scale, initial_state, output_final_state):
        assert q.dtype == k.dtype == v.dtype
        weights = scale * torch.einsum("bthk,bshk->bhts", q, k).tril()
        output = torch.einsum("bhts,bshv->bthv", weights, v)
        state = torch.einsum("bshk,bshv->bhkv", k, v)
        if initial_state is not None:
            output += torch.einsum("bthk,bhkv->bthv", q, initial_state)
            state += initial_state
        return output, state if output_final_state else None

    module = types.SimpleNamespace(chunk_simple_gla=chunk_simple_gla)
    for name in ("fla", "fla.ops", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(choice, "_torch_obstacle", lambda *_: None)
    arrays, mask = case.draw()
    expected = case.fast(arrays, mask, "chunked")
    if mask is not None:
        for name in ("key", "value"):
            arrays[name][~mask] = np.nan
    tolerance = 1e-5 if case.dtype == "float32" else 0.05
    for one, other in zip(case.fast(arrays, mask, "fla"), expected, strict=True):
        error = (one - other).square().mean() / other.square().mean()
        assert torch.sqrt(error) < tolerance
    weight = np.zeros((2, case.key_length or 20, 2), "float32")
    with pytest.raises(ValueError, match="does not support `key_log_weight`"):
        case.fast({**arrays, "log_weight": weight}, mask, "fla")


@pytest.mark.skipif(
    not choice.HAS_PACKAGE["fla"] or not torch.cuda.is_available(),
    reason="flash-linear-attention needs a GPU",
)
@pytest.mark.parametrize("with_state", [False, True])
def test_flash_linear_attention_computes_the_same(with_state):
    case = Case(length=150, dims=(64, 64), masked=True, with_state=with_state)
    arrays, mask = case.draw()
    tensors = {name: torch.tensor(x).cuda() for name, x in arrays.items()}
    mask = torch.tensor(mask).cuda()
    received = case.fast(tensors, mask, "fla")
    expected = case.fast(tensors, mask, "chunked")
    for one, other in zip(received, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
