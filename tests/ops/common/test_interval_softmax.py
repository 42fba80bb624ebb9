"""Softmax over patterns by JAX's splash attention and PyTorch's FlexAttention."""

import functools
import importlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import (
    local_attention,
    local_pattern,
    sparse_attention,
    sparse_pattern,
)
from keras_efficient_attn.ops.common.interval_softmax import choice
from keras_efficient_attn.ops.common.interval_softmax.choice import KERNELS
from keras_efficient_attn.ops.common.plan import device_kind
from tests.autodiff import gradient_function, to_numpy
from tests.ops.pieces import (
    check_masked_softmax,
    heads_of,
    masked_softmax,
    softmax_gradients,
)

KERNEL = {kernel.backend: name for name, kernel in KERNELS.items()}
LENGTH, HEADS = 200, 2
# The compiler of FlexAttention takes no heads below 16.
DIM, VALUE_DIM = (20, 16) if device_kind() == "gpu" else (8, 5)
# An operation's arguments, whether it is causal, whether keys are hidden.
LOCAL = [
    (dict(window=9), True, True),
    (dict(window=130), False, False),
    (dict(query_block=7, memory=3), True, False),
    (dict(query_block=60), False, True),
]
SPARSE = [
    (dict(pattern="strided", stride=13, factors="split"), True, True),
    (dict(pattern="strided", stride=13, factors=1), False, False),
    (dict(pattern="fixed", stride=40, summary=3), True, False),
    (dict(pattern="fixed", stride=13), False, True),
    (dict(pattern="fixed", stride=13, factors="split"), False, True),
    (dict(pattern="fixed", stride=13, factors=0), True, False),
    # Two parts, merged by their log scales.
    (dict(pattern="strided", stride=13), True, True),
    (dict(pattern="strided", stride=13), False, False),
]


@pytest.fixture(autouse=True)
def kernel(backend, monkeypatch):
    """The name of the backend's kernel, with small blocks for short sequences."""
    if backend not in KERNEL:
        pytest.skip("TensorFlow brings no such kernel")
    name = KERNEL[backend]
    package = "keras_efficient_attn.ops.common.interval_softmax"
    monkeypatch.setattr(importlib.import_module(f"{package}.{name}"), "BLOCK", 128)
    if name == "flex":
        flex_attention = importlib.import_module("torch.nn.attention.flex_attention")
        # It refuses gradients on a CPU although it can compute them.
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    return name


def draw_mask(masked, length=LENGTH):
    """The first keys are hidden from the first sequence: some queries see none."""
    if not masked:
        return None
    mask = np.random.default_rng(3).random((2, length)) > 0.3
    mask[0, :20] = False
    return mask


def check(attend, allowed, mask, key_length=LENGTH):
    """Compares values and gradients with the formula; hidden keys are NaN."""
    tensors = (
        heads_of(LENGTH, DIM),
        heads_of(key_length, DIM, seed=1),
        heads_of(key_length, VALUE_DIM),
    )
    check_masked_softmax(
        functools.partial(attend, key_mask=mask, scale=0.5),
        tensors,
        allowed,
        heads_of(LENGTH, VALUE_DIM, seed=4),
        mask,
    )


@pytest.mark.parametrize(("pattern", "causal", "masked"), LOCAL, ids=str)
def test_local_attention_is_the_masked_softmax(kernel, pattern, causal, masked):
    def attend(*tensors, **arguments):
        options = dict(causal=causal, implementation=kernel)
        return local_attention(*tensors, **pattern, **arguments, **options)

    allowed = local_pattern(LENGTH, causal=causal, **pattern)
    check(attend, allowed, draw_mask(masked))


@pytest.mark.parametrize(("pattern", "causal", "masked"), SPARSE, ids=str)
def test_sparse_attention_is_the_masked_softmax(kernel, pattern, causal, masked):
    def attend(*tensors, **arguments):
        options = dict(causal=causal, implementation=kernel)
        return sparse_attention(*tensors, **pattern, **arguments, **options)

    allowed = sparse_pattern(LENGTH, **pattern, causal=causal, num_heads=HEADS)
    check(attend, allowed, draw_mask(masked))


@pytest.mark.parametrize("key_length", [150, 230])
def test_lengths_may_differ(kernel, key_length):
    def attend(*tensors, **arguments):
        return local_attention(*tensors, window=9, implementation=kernel, **arguments)

    allowed = local_pattern(max(LENGTH, key_length), window=9)
    check(attend, allowed[:LENGTH, :key_length], None, key_length)


@pytest.mark.parametrize(
    ("attend", "pattern", "options"),
    [
        (local_attention, local_pattern, dict(window=9)),
        (sparse_attention, sparse_pattern, dict(pattern="strided", stride=13)),
    ],
)
def test_values_and_gradients_keep_their_dtype(kernel, attend, pattern, options):
    x = ops.cast(heads_of(LENGTH, 16), "bfloat16")
    weight = heads_of(LENGTH, 16, seed=4)
    options = dict(options, causal=True)

    def loss(query, key, value):
        tensors = (ops.cast(x, "bfloat16") for x in (query, key, value))
        output = attend(*tensors, implementation=kernel, **options)
        assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
        return ops.sum(ops.multiply(ops.cast(output, "float32"), weight))

    output = attend(x, x, x, implementation=kernel, **options)
    wide = to_numpy(ops.cast(x, "float32"))
    allowed = np.broadcast_to(pattern(LENGTH, **options), (2, HEADS, LENGTH, LENGTH))
    expected = masked_softmax(wide, wide, wide, allowed, scale=0.25)
    output = to_numpy(ops.cast(output, "float32"))
    np.testing.assert_allclose(output, expected, rtol=0.02, atol=0.02)
    received = gradient_function(loss)(wide, wide, wide)
    gradients = softmax_gradients(wide, wide, wide, allowed, 0.25, weight)
    for gradient, correct in zip(received, gradients, strict=True):
        error = np.linalg.norm(to_numpy(gradient) - correct)
        assert error < 0.02 * np.linalg.norm(correct)


def test_lists_of_blocks_hold_the_pattern_and_little_else(backend):
    if backend != "torch":
        pytest.skip("splash attention makes its own lists")
    from keras_efficient_attn.ops.common.interval_softmax import flex
    from keras_efficient_attn.ops.common.interval_softmax.intervals import (
        AllKeys,
        NearKeys,
    )
    from keras_efficient_attn.ops.common.masks import SlidingWindow

    length = 8 * flex.BLOCK - 5
    pattern = NearKeys(SlidingWindow(flex.BLOCK, True), length)
    blocks = flex.block_mask(pattern, length, None, "cpu").to_dense()[0, 0]
    near = np.eye(8) + np.eye(8, k=-1)
    np.testing.assert_array_equal(to_numpy(blocks), near)

    mask = flex.block_mask(AllKeys(length), length, None, "cpu")
    np.testing.assert_array_equal(to_numpy(mask.to_dense()[0, 0]), np.ones((8, 8)))
    counts = to_numpy(mask.full_kv_num_blocks[0, 0])
    np.testing.assert_array_equal(counts, [7] * 7 + [0])


def test_one_program_computes_all_patterns_with_as_many_intervals(backend):
    """PyTorch stops compiling after some programs, and would compute all pairs."""
    if backend != "torch":
        pytest.skip("compiled programs of splash attention have no limit")
    import torch
    from torch._dynamo.testing import CompileCounter

    from keras_efficient_attn.ops.common.interval_softmax import flex
    from keras_efficient_attn.ops.common.interval_softmax.intervals import NearKeys
    from keras_efficient_attn.ops.common.masks import SlidingWindow
    from keras_efficient_attn.ops.sparse_attention.kernel_path import ColumnRows

    programs = CompileCounter()
    attend = torch.compile(flex.flex_attention, backend=programs, fullgraph=True)
    for length in (130, 200, 300, 400, 500, 600):
        x = torch.rand(1, HEADS, length, 8)
        windows = [SlidingWindow(size, True) for size in (3, 50)]
        patterns = [NearKeys(window, length) for window in windows]
        for pattern in (*patterns, ColumnRows(length, True, True)):
            mask = flex.block_mask(pattern, length, None, x.device)
            attend(x, x, x, block_mask=mask)
    # The first length; any length of as many blocks; any length.
    assert programs.frame_count <= 3


def test_a_mask_made_in_inference_mode_can_be_used_in_training(backend):
    if backend != "torch":
        pytest.skip("PyTorch's inference mode")
    import torch

    from keras_efficient_attn.ops.common.interval_softmax import flex
    from keras_efficient_attn.ops.common.interval_softmax.intervals import AllKeys

    with torch.inference_mode():
        mask = flex.block_mask(AllKeys(17), 17, None, torch.device("cpu"))
    tensors = [x for x in mask.as_tuple() if isinstance(x, torch.Tensor)]
    assert tensors and not any(x.is_inference() for x in tensors)


@pytest.mark.parametrize(
    ("attend", "options", "message"),
    [
        (
            local_attention,
            dict(grid=(2, 8), query_block=(2, 2)),
            "not support `grid`",
        ),
        (
            local_attention,
            dict(dropout=(0.5, np.zeros(2))),
            "not support `dropout`",
        ),
        (
            sparse_attention,
            dict(pattern="fixed", stride=4, factors=1, causal=True),
            "pattern='fixed'.*Received: factors=1",
        ),
    ],
    ids=["grid", "dropout", "summaries"],
)
def test_a_kernel_that_is_named_says_why_it_cannot_run(
    kernel, attend, options, message
):
    x = heads_of(16, DIM)
    with pytest.raises(ValueError, match=f"'{kernel}'.*{message}"):
        attend(x, x, x, implementation=kernel, **options)


def test_the_compiler_for_a_gpu_takes_no_small_heads(backend):
    if backend != "torch":
        pytest.skip("splash attention takes any heads")

    class OnCuda:
        is_cuda, dtype = True, "float32"

        def __init__(self, dim):
            self.shape = (1, 40, HEADS, dim)

    assert choice._obstacle("flex", [OnCuda(16)] * 3) is None
    obstacle = choice._obstacle("flex", [OnCuda(16), OnCuda(16), OnCuda(15)])
    assert "heads of at least 16. Received: " in obstacle


def test_the_kernel_of_another_backend_is_refused(kernel):
    (other,) = KERNELS.keys() - {kernel}
    x = heads_of(16, DIM)
    message = f"'{other}'.* needs the backend '{KERNELS[other].backend}'"
    with pytest.raises(ValueError, match=message):
        local_attention(x, x, x, implementation=other)
