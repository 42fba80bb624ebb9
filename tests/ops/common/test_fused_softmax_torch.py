"""Blocks by PyTorch's fused kernel for CPUs: many blocks, and partial ones.

Expected is the dense softmax in float64.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest

from keras_efficient_attn.ops import (
    local_attention,
    local_attention_state,
    local_pattern,
    sparse_attention,
    sparse_pattern,
    vq_attention,
)
from keras_efficient_attn.ops.common.plan import block_sizes
from tests.autodiff import to_numpy
from tests.ops.pieces import (
    TOLERANCE,
    check_masked_softmax,
    masked_softmax,
    read_masked_pieces,
    softmax_gradients,
)

if keras.backend.backend() != "torch":
    pytest.skip("the kernel is PyTorch's", allow_module_level=True)

import torch

from keras_efficient_attn.ops.common import fused_softmax_torch
from keras_efficient_attn.ops.vq_attention import blocks_torch

pytestmark = pytest.mark.usefixtures("on_cpu")
# Many more blocks than rows of a batch, and the last block is not full.
LENGTH, HEADS = 430, 2
LOCAL = {
    "window": dict(window=40),
    "wide-window": dict(window=150),
    "window-of-one": dict(window=1),
    "blocks": dict(query_block=7, memory=20),
    "blocks-alone": dict(query_block=70, memory=0),
}
SPARSE = {
    "strided": dict(stride=20),
    "strided-split": dict(stride=20, factors="split"),
    "fixed": dict(pattern="fixed", stride=20, summary=3),
    "fixed-far": dict(pattern="fixed", stride=20, factors=1),
}
PATTERNS = {
    **{name: (local_attention, options) for name, options in LOCAL.items()},
    **{name: (sparse_attention, options) for name, options in SPARSE.items()},
}


def draw(lengths=(LENGTH, LENGTH), dtype="float32", value_dim=5):
    random = np.random.default_rng(0)
    shapes = (lengths[0], 4), (lengths[1], 4), (lengths[1], value_dim)
    return [
        random.normal(size=(2, length, HEADS, dim)).astype(dtype)
        for length, dim in shapes
    ]


def draw_mask(length=LENGTH):
    """Hides single keys, more than a window of one sequence, and the other's start."""
    mask = np.random.default_rng(1).random((2, length)) > 0.3
    mask[0, 60:400] = mask[1, :25] = False
    return mask


def is_visible(operation, options, lengths, causal):
    longest = max(lengths)
    if operation is local_attention:
        seen = local_pattern(longest, causal=causal, **options)[None]
    else:
        seen = sparse_pattern(longest, causal=causal, num_heads=HEADS, **options)
    return seen[None, :, : lengths[0], : lengths[1]]


def differentiate(attend, arrays, weight):
    """The output, and gradients of the sum of `weight * output`."""
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    output = attend(*tensors)
    gradients = torch.autograd.grad((output * torch.from_numpy(weight)).sum(), tensors)
    return to_numpy(output), [to_numpy(x) for x in gradients]


@pytest.mark.parametrize("lengths", [(430, 430), (430, 150), (150, 430)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_the_masked_softmax(name, causal, lengths):
    operation, options = PATTERNS[name]
    tensors, mask = draw(lengths), draw_mask(lengths[1])
    allowed = is_visible(operation, options, lengths, causal)
    if lengths[0] == lengths[1] and (causal or operation is local_attention):
        sees_keys = (allowed & mask[:, None, None]).any(-1)
        assert not sees_keys.all(), "Some queries are to see no key."
    weight = tensors[0][..., :1] * np.ones(5, "float32")
    attend = functools.partial(operation, causal=causal, key_mask=mask, **options)
    check_masked_softmax(attend, tensors, allowed, weight, mask)


@pytest.mark.parametrize("name", PATTERNS)
def test_float64(name):
    operation, options = PATTERNS[name]
    arrays = draw(dtype="float64", value_dim=3)
    allowed = is_visible(operation, options, (LENGTH, LENGTH), True)
    attend = functools.partial(operation, causal=True, **options)
    tight = dict(rtol=1e-10, atol=1e-12)
    check_masked_softmax(attend, arrays, allowed, arrays[2], tolerance=tight)


@pytest.mark.parametrize("name", LOCAL)
def test_segments_of_many_blocks_are_the_whole(name):
    options = LOCAL[name]
    arrays, mask = draw(), draw_mask()
    allowed = is_visible(local_attention, options, (LENGTH, LENGTH), True)
    expected = masked_softmax(*arrays, allowed & mask[:, None, None], scale=0.5)
    arrays[1][~mask] = arrays[2][~mask] = np.nan
    attend = functools.partial(local_attention, **options)
    state = local_attention_state(2, HEADS, 4, 5, **options)
    sizes = 3, 290, 1, 136
    output, _ = read_masked_pieces(attend, state, arrays, mask, sizes)
    np.testing.assert_allclose(output, expected, **TOLERANCE)


@pytest.mark.parametrize("name", PATTERNS)
def test_nothing_of_the_future_reaches_the_past(name):
    operation, options = PATTERNS[name]
    arrays = [torch.from_numpy(x).requires_grad_() for x in draw()]
    output = operation(*arrays, causal=True, **options)
    gradients = torch.autograd.grad(output[:, 300].sum(), arrays)
    assert not any(gradient[:, 301:].any() for gradient in gradients)
    with torch.no_grad():
        for array in arrays:
            array[:, 300:] *= 1000.0
        changed = operation(*arrays, causal=True, **options)
    np.testing.assert_array_equal(to_numpy(changed)[:, :300], to_numpy(output)[:, :300])


def test_bfloat16_is_summed_in_float32():
    """Sums of bfloat16 would stop growing at 256."""
    x = torch.zeros(1, 2000, 1, 8, dtype=torch.bfloat16)
    value = torch.rand(1, 2000, 1, 8, generator=torch.Generator().manual_seed(0))
    value = value.to(torch.bfloat16)
    output = local_attention(x, x, value, window=2000, causal=True)
    assert output.dtype == torch.bfloat16
    expected = value.double().mean(1)
    np.testing.assert_allclose(to_numpy(output.double())[:, -1], expected, rtol=4e-3)


def test_parts_far_apart_are_merged():
    """One part has all the weight, in either direction."""
    query, key, value = draw(value_dim=4)
    options = dict(stride=20)
    allowed = is_visible(sparse_attention, options, (LENGTH, LENGTH), True)
    for size in (30.0, -30.0):
        large = np.where(np.arange(LENGTH)[None, :, None, None] < 40, size * key, key)
        large = large.astype("float32")
        weight = draw(value_dim=4)[2]
        output, gradients = differentiate(
            lambda *x: sparse_attention(*x, causal=True, **options),
            (query, large, value),
            weight,
        )
        expected = masked_softmax(query, large, value, allowed, scale=0.5)
        np.testing.assert_allclose(output, expected, **TOLERANCE)
        correct = softmax_gradients(query, large, value, allowed, 0.5, weight)
        for ours, theirs in zip(gradients, correct, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_codes_are_read_group_by_group(causal, monkeypatch):
    """Groups of one block each: the sums carry over to the next group."""
    plan = dataclasses.replace(block_sizes(), step_floats=1)
    monkeypatch.setattr(blocks_torch, "block_sizes", lambda: plan)
    query, key, value = draw((90, 90), "float64")
    codes = np.random.default_rng(2).normal(size=(HEADS, 6, 4))
    index = (key[:, :, :, None] - codes[None, None]) ** 2
    chosen = codes[np.arange(HEADS), index.sum(-1).argmin(-1)]
    mask, positions = draw_mask(90), np.arange(90)
    distance = positions[:, None] - positions
    near = abs(distance) < 20
    seen = mask[:, None, None] & (distance >= 0 if causal else np.ones_like(near))
    # Keys beyond the window are their codes: two sets of keys, under one softmax.
    allowed = np.concatenate([seen & near, seen & ~near], axis=-1)
    both = np.concatenate([key, chosen], 1), np.concatenate([value, value], 1)
    weight = draw((90, 90), "float64")[2]
    expected = masked_softmax(query, *both, allowed, scale=1.0)
    grad_query, grad_key, grad_value = softmax_gradients(
        query, *both, allowed, 1.0, weight
    )
    # Codes have no gradient, but their keys' values have.
    correct = grad_query, grad_key[:, :90], grad_value[:, :90] + grad_value[:, 90:]
    key[~mask] = value[~mask] = np.nan

    def attend(query, key, value):
        options = dict(window=20, block_length=8, causal=causal, key_mask=mask)
        return vq_attention(query, key, value, torch.from_numpy(codes), **options)

    output, gradients = differentiate(attend, (query, key, value), weight)
    tight = dict(rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(output, expected, **tight)
    for ours, theirs in zip(gradients, correct, strict=True):
        np.testing.assert_allclose(ours, theirs, **tight)


@pytest.mark.parametrize("name", ["window", "strided", "fixed", "codes"])
def test_a_compiled_program_is_the_masked_softmax(name):
    """The kernel is one operation of the program, forward and backward."""
    arrays, mask, weight = draw(), torch.from_numpy(draw_mask()), draw()[2]
    operation, options = PATTERNS.get(name, (vq_attention, dict(window=20)))
    if name == "codes":
        codes = np.random.default_rng(2).normal(size=(HEADS, 6, 4)).astype("float32")
        options = dict(codebook=torch.from_numpy(codes), block_length=16, **options)

    def attend(query, key, value):
        return operation(query, key, value, causal=True, key_mask=mask, **options)

    programs = []

    def keep(program, _):
        programs.append(program)
        return program

    torch.compiler.reset()
    received = differentiate(
        torch.compile(attend, backend="aot_eager", fullgraph=True), arrays, weight
    )
    torch.compiler.reset()
    torch.compile(attend, backend=keep)(*map(torch.from_numpy, arrays))
    called = [str(node.target) for node in programs[0].graph.nodes]
    assert any("keras_efficient_attn.attend" in target for target in called)
    if name == "codes":
        expected = differentiate(attend, arrays, weight)
    else:
        allowed = is_visible(operation, options, (LENGTH, LENGTH), True)
        allowed = allowed & mask.numpy()[:, None, None]
        expected = (
            masked_softmax(*arrays, allowed, scale=0.5),
            softmax_gradients(*arrays, allowed, 0.5, weight),
        )
    np.testing.assert_allclose(received[0], expected[0], **TOLERANCE)
    for ours, theirs in zip(received[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)


KINDS = {
    "band": ([], "SlidingWindow 5 1"),
    "blocks": ([torch.ones(20, 20).tril() > 0], ""),
    "shared": ([torch.arange(20), torch.arange(20)[None]], "Summaries 4 1 1"),
    "weighted": ([torch.zeros(1, 2, 20)], ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_operation_is_as_it_declares(kind):
    tensors, mask = KINDS[kind]
    query, key, value = torch.rand(3, 1, 20, 2, 4, requires_grad=True).unbind()
    arguments = query, key, value, torch.ones(1, 20), tensors, kind, mask
    if kind == "weighted":
        arguments = *arguments[:3], None, *arguments[4:]
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(fused_softmax_torch.attend_op, arguments, test_utils=tests)
