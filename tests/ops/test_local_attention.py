"""Windows, blocks and rectangles: what they hold, and what they compute."""

import types

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import (
    local_attention,
    local_attention_state,
    local_pattern,
)
from tests import dense
from tests.autodiff import gradient_function, to_numpy
from tests.largest_tensor import largest_tensor

PATTERNS = [
    dict(window=6),
    dict(query_block=3, memory=7),
    dict(query_block=(2, 3), memory=(3, 1), grid=(5, 7)),
    dict(query_block=(4, 2), memory=(0, 3), grid=(7, 5), order="block"),
]
DEFAULTS = dict(window=None, query_block=None, memory=None, grid=None, order="raster")


def pattern_id(pattern):
    return "-".join(str(value).replace(" ", "") for value in pattern.values())


def heads_of(length, dim=4, seed=0, heads=2):
    random = np.random.default_rng(seed)
    return random.normal(size=(2, length, heads, dim)).astype("float32")


def defined(pattern, length, causal):
    """The boolean matrix, from the definition."""
    layer = types.SimpleNamespace(**{**DEFAULTS, **pattern})
    return np.array(
        [
            [
                dense.is_near(layer, i, j) and (j <= i or not causal)
                for j in range(length)
            ]
            for i in range(length)
        ]
    )


@pytest.mark.parametrize("window", [1, 4])
def test_a_window_holds_exactly_its_number_of_keys(window):
    length = 9
    counts = local_pattern(length, window=window, causal=True).sum(1)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(length) + 1, window))
    full = local_pattern(length, window=window).sum(1)
    assert full[length // 2] == 2 * window - 1


def test_blocks_look_at_their_memory():
    matrix = local_pattern(9, query_block=3, memory=2, causal=True)
    expected = """
        #........
        ##.......
        ###......
        .###.....
        .####....
        .#####...
        ....###..
        ....####.
        ....#####"""
    lines = ["".join(".#"[int(x)] for x in row) for row in matrix]
    assert lines == expected.split()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("raster", "##### ##### ##Q.. ..... ....."),
        # Block by block: the left block is done down to its last row.
        ("block", "##### ##### ##Q.. ##... ....."),
    ],
)
def test_what_a_pixel_sees_in_an_image(order, expected):
    # The pixel in row 2, column 2 of a 5 x 5 image; its block begins there.
    pattern = dict(query_block=(2, 2), memory=(2, 2), grid=(5, 5), order=order)
    steps = dense.grid_steps((5, 5), (2, 2), order)
    query = steps.index((2, 2))
    seen = local_pattern(25, causal=True, **pattern)[query]
    image = [["."] * 5 for _ in range(5)]
    for (row, column), is_seen in zip(steps, seen, strict=True):
        image[row][column] = "#" if is_seen else "."
    assert image[2][2] == "#"
    image[2][2] = "Q"
    assert " ".join("".join(row) for row in image) == expected


@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_masked_softmax(pattern, causal):
    length = 31
    query, key, value = heads_of(length), heads_of(length, seed=1), heads_of(length, 5)
    mask = np.random.default_rng(3).random((2, length)) > 0.3
    mask[0, :4] = False
    allowed = defined(pattern, length, causal)
    np.testing.assert_array_equal(
        local_pattern(length, causal=causal, **pattern), allowed
    )
    allowed = allowed[None, None] & mask[:, None, None]
    weight = heads_of(length, 5, seed=4)
    arguments = dict(key_mask=mask, causal=causal, **pattern)

    def loss(query, key, value):
        output = local_attention(query, key, value, **arguments)
        return ops.sum(ops.multiply(output, weight))

    logits = np.einsum("bthd,bshd->bhts", query.astype("float64"), key) / 2
    weights = np.where(allowed, np.exp(logits), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)
    expected = np.einsum("bhts,bshv->bthv", weights, value)
    output = to_numpy(local_attention(query, key, value, **arguments))
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    # The derivative of a softmax, written out.
    of_weights = np.einsum("bthv,bshv->bhts", weight, value)
    mean = (weights * of_weights).sum(-1, keepdims=True)
    of_logits = weights * (of_weights - mean) / 2
    gradients = (
        np.einsum("bhts,bshd->bthd", of_logits, key),
        np.einsum("bhts,bthd->bshd", of_logits, query),
        np.einsum("bhts,bthv->bshv", weights, weight),
    )
    for received, correct in zip(
        gradient_function(loss)(query, key, value), gradients, strict=True
    ):
        np.testing.assert_allclose(received, correct, rtol=1e-4, atol=1e-5)


def test_windows_wider_than_a_block():
    x = heads_of(150, heads=1)
    for pattern in (dict(window=71, causal=True), dict(query_block=33, memory=40)):
        output, expected = (
            local_attention(x, x, x, implementation=name, **pattern)
            for name in ("blocks", "reference")
        )
        np.testing.assert_allclose(
            to_numpy(output), to_numpy(expected), rtol=1e-4, atol=1e-5
        )


def test_a_window_of_one_copies_the_values():
    x = heads_of(9)
    output = to_numpy(local_attention(x, x, x, window=1))
    np.testing.assert_allclose(output, x, rtol=1e-6)


@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
def test_it_streams(pattern):
    length = 31
    query, key, value = heads_of(length), heads_of(length, seed=1), heads_of(length, 5)
    whole = to_numpy(local_attention(query, key, value, causal=True, **pattern))
    state = local_attention_state(2, 2, 4, 5, **pattern)
    outputs, start = [], 0
    for size in (1, 29, 1):
        piece = slice(start, start + size)
        output, state = local_attention(
            query[:, piece],
            key[:, piece],
            value[:, piece],
            causal=True,
            state=state,
            **pattern,
        )
        outputs.append(to_numpy(output))
        start += size
    np.testing.assert_allclose(np.concatenate(outputs, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "pattern",
    [
        dict(window=32),
        dict(query_block=32, memory=32),
        dict(query_block=(4, 8), memory=(4, 4), grid=(32, 32)),
    ],
    ids=pattern_id,
)
def test_no_tensor_has_the_size_of_the_matrix(pattern):
    length = 1024
    x = np.ones((1, length, 1, 4), "float32")

    def loss(x):
        return ops.sum(ops.square(local_attention(x, x, x, causal=True, **pattern)))

    assert largest_tensor(loss, x) < length**2 / 4


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length(causal, backend):
    if backend != "jax":
        pytest.skip("only JAX tells how much memory a compiled program takes")
    import jax

    def temporary_bytes(length):
        def loss(x):
            output = local_attention(x, x, x, window=64, causal=causal)
            return ops.sum(ops.square(output))

        program = jax.jit(jax.grad(loss)).lower(np.zeros((1, length, 1, 4), "float32"))
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16384) < 1.1 * 4 * temporary_bytes(4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=0), "window=0"),
        (dict(window=4, query_block=4), "exclude each other"),
        (dict(memory=4), "memory=4, query_block=None"),
        (dict(grid=(2, 2)), r"grid=\(2, 2\), query_block=None"),
        (dict(query_block=0), "query_block=0"),
        (dict(query_block=2, memory=-1), "memory=-1"),
        (dict(query_block=2, memory=(1, 1)), r"memory=\(1, 1\)"),
        (dict(query_block=2, grid=(2, 2)), r"grid=\(2, 2\)"),
        (dict(query_block=(2, 0), grid=(2, 2)), r"query_block=\(2, 0\)"),
        (dict(query_block=(2, 2), memory=1, grid=(2, 2)), "memory=1"),
        (dict(query_block=(2, 2)), "grid=None"),
        (dict(query_block=(2, 2), grid=(1, 3)), r"query.shape=\(2, 4, 2, 4\)"),
        (dict(order="diagonal"), "order='diagonal'"),
        (dict(window=3, order="block"), "order='block'"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    x = heads_of(4)
    with pytest.raises(ValueError, match=message):
        local_attention(x, x, x, **options)


def test_a_pattern_has_to_fit_in_its_grid():
    with pytest.raises(ValueError, match="length=5"):
        local_pattern(5, query_block=(2, 2), grid=(2, 2))
