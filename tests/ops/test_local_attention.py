"""Windows, blocks and rectangles: their patterns and outputs."""

import contextlib
import dataclasses
import functools
import types

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import (
    local_attention,
    local_attention_state,
    local_pattern,
)
from keras_efficient_attn.ops.local_attention.config import LocalConfig
from tests import dense
from tests.autodiff import gradient_function, to_numpy
from tests.largest_tensor import largest_tensor, temporary_bytes
from tests.ops.pieces import (
    SIZES,
    TOLERANCE,
    check_masked_softmax,
    draw_mask,
    draw_with_hidden_keys,
    heads_of,
    masked_softmax,
    read_in_pieces,
    read_masked_pieces,
)

PATTERNS = [
    dict(window=6),
    dict(query_block=3, memory=7),
    dict(query_block=(2, 3), memory=(3, 1), grid=(5, 7)),
    dict(query_block=(4, 2), memory=(0, 3), grid=(7, 5), grid_order="block"),
]
DEFAULTS = dict(
    window=None, query_block=None, memory=None, grid=None, grid_order="raster"
)


def pattern_id(pattern):
    return "-".join(str(value).replace(" ", "") for value in pattern.values())


def reference(pattern, length, causal):
    """The boolean matrix by the definition."""
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
        # Block by block: the left block is complete down to its last row.
        ("block", "##### ##### ##Q.. ##... ....."),
    ],
)
def test_what_a_pixel_sees_in_an_image(order, expected):
    # The pixel in row 2, column 2 of a 5 x 5 image; its block starts there.
    pattern = dict(query_block=(2, 2), memory=(2, 2), grid=(5, 5), grid_order=order)
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
    tensors = heads_of(length), heads_of(length, seed=1), heads_of(length, 5)
    weight, mask = heads_of(length, 5, seed=4), draw_mask(length)
    allowed = reference(pattern, length, causal)
    np.testing.assert_array_equal(
        local_pattern(length, causal=causal, **pattern), allowed
    )

    def attend(*tensors):
        return local_attention(*tensors, key_mask=mask, causal=causal, **pattern)

    check_masked_softmax(attend, tensors, allowed, weight, mask)


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


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_beyond_the_sequence_costs_no_more(causal, backend):
    x = heads_of(256)
    logits = np.einsum("bthd,bshd->bhts", *[x.astype("float64")] * 2) / 2
    logits[..., ~reference(dict(window=256), 256, causal)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    received = local_attention(x, x, x, window=4096, causal=causal)
    expected = np.einsum("bhts,bshd->bthd", weights, x)
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-4, atol=1e-5)
    if backend != "jax":
        return
    import jax

    # Without dropout, a causal window has another form.
    options = dict(causal=causal, dropout=(0.5, np.ones(2, "float32")))

    def operations(window):
        def attend(x):
            return local_attention(x, x, x, window=window, **options)

        return jax.jit(attend).lower(x).compile().cost_analysis()["flops"]

    assert operations(4096) <= 1.01 * operations(256)


def test_a_window_of_one_copies_the_values():
    x = heads_of(9)
    output = to_numpy(local_attention(x, x, x, window=1))
    np.testing.assert_allclose(output, x, rtol=1e-6)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "pattern",
    # One key, and a window that is never full.
    [*PATTERNS, dict(window=1), dict(window=50), dict(query_block=40, memory=9)],
    ids=pattern_id,
)
def test_tokens_and_segments_are_the_whole(pattern, sizes):
    length = 31
    *tensors, mask = draw_with_hidden_keys(length)
    state = local_attention_state(2, 2, 4, 5, **pattern)
    attention = functools.partial(local_attention, **pattern)
    sizes = SIZES[sizes](length)
    output, state = read_masked_pieces(attention, state, tensors, mask, sizes)
    clean = [np.nan_to_num(x) for x in tensors]
    allowed = reference(pattern, length, True) & mask[:, None, None]
    expected = masked_softmax(*clean, allowed, scale=0.5)
    np.testing.assert_allclose(output, expected, **TOLERANCE)
    # The last keys within a query's reach, in order; there were none before.
    reach = state["mask"].shape[1]
    kept = np.pad(mask, ((0, 0), (reach, 0)))[:, length:]
    np.testing.assert_array_equal(to_numpy(state["mask"]) > 0, kept)
    keys = np.pad(clean[1], ((0, 0), (reach, 0), (0, 0), (0, 0)))[:, length:]
    np.testing.assert_array_equal(to_numpy(state["key"]), keys)


@pytest.mark.parametrize("order", ["raster", "block"])
@pytest.mark.parametrize("size", [1, 3])
def test_outputs_beyond_the_grid_are_nan(size, order):
    pattern = dict(query_block=(2, 2), memory=(1, 1), grid=(2, 3), grid_order=order)
    x, state = heads_of(9), local_attention_state(2, 2, 4, 4, **pattern)

    def attend(x, state):
        return local_attention(x, x, x, causal=True, state=state, **pattern)

    output, _ = read_in_pieces(attend, state, [x], (size,) * (9 // size))
    allowed = reference(pattern, 6, True)[None, None]
    expected = masked_softmax(x[:, :6], x[:, :6], x[:, :6], allowed, scale=0.5)
    np.testing.assert_allclose(output[:, :6], expected, **TOLERANCE)
    assert np.isnan(output[:, 6:]).all()


def test_positions_are_exact_beyond_the_integers_of_float32():
    # Floats are 16 apart there; a multiple of the block.
    first, pattern = 2**28 + 2, dict(query_block=3, memory=2)
    assert first % 3 == 0
    x = heads_of(13)
    state = local_attention_state(2, 2, 4, 4, **pattern)
    state["position"] = ops.full((2,), first, "int32")

    def attend(x, state):
        return local_attention(x, x, x, causal=True, state=state, **pattern)

    output, state = read_in_pieces(attend, state, [x], (8, 5))
    expected = masked_softmax(x, x, x, reference(pattern, 13, True)[None, None], 0.5)
    np.testing.assert_allclose(output, expected, **TOLERANCE)
    assert to_numpy(state["position"]).tolist() == [first + 13] * 2


def test_a_token_in_float64(backend):
    wide = contextlib.nullcontext()
    if backend == "jax":
        import jax

        wide = jax.enable_x64(True)
    query, key, value = (heads_of(9, seed=n).astype("float64") for n in range(3))

    def attend(query, key, value, state):
        return local_attention(query, key, value, window=5, causal=True, state=state)

    with wide:
        state = local_attention_state(2, 2, 4, 4, window=5, dtype="float64")
        output, _ = read_in_pieces(attend, state, (query, key, value), (1,) * 9)
    allowed = reference(dict(window=5), 9, True)
    expected = masked_softmax(query, key, value, allowed, scale=0.5)
    assert output.dtype == "float64"
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-13)


def test_gradients_of_a_token():
    length, x = 7, heads_of(7)
    weight = heads_of(length, seed=4)

    def loss(x, sizes):
        state, total, start = local_attention_state(2, 2, 4, 4, window=3), 0.0, 0
        for size in sizes:
            piece = x[:, start : start + size]
            output, state = local_attention(
                piece, piece, piece, window=3, causal=True, state=state
            )
            total += ops.sum(ops.multiply(output, weight[:, start : start + size]))
            start += size
        return total

    (tokens,), (segments,) = (
        gradient_function(functools.partial(loss, sizes=sizes))(x)
        for sizes in ((1,) * length, (3, 4))
    )
    np.testing.assert_allclose(tokens, segments, **TOLERANCE)


def test_dropout_of_a_token():
    length, rate = 400, 0.4
    random = np.random.default_rng(0)
    key = random.normal(size=(2, length, 3, 4)).astype("float32")
    one_hot = np.eye(length, dtype="float32")[None, :, None]
    value = np.broadcast_to(one_hot, (2, length, 3, length))
    options = dict(window=length, causal=True)
    state = local_attention_state(2, 3, 4, length, window=length)
    piece = slice(0, length - 1)
    _, state = local_attention(
        key[:, piece], key[:, piece], value[:, piece], state=state, **options
    )
    last = [x[:, -1:] for x in (key, key, value)]
    weights, dropped = (
        to_numpy(local_attention(*last, state=state, **options, **dropout)[0])
        for dropout in ({}, dict(dropout=(rate, np.array([1.0, 2.0]))))
    )
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / (1 - rate), rtol=1e-5)
    assert abs(kept.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / kept.size)


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

    def loss(x):
        return ops.sum(ops.square(local_attention(x, x, x, window=64, causal=causal)))

    short, long = (
        temporary_bytes(jax.grad(loss), np.zeros((1, length, 1, 4), "float32"))
        for length in (4096, 16384)
    )
    assert long < 1.1 * 4 * short


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=0), "window=0"),
        (dict(window=True), "window=True"),
        (dict(query_block=True), "query_block=True"),
        (dict(query_block=2, memory=True), "memory=True"),
        (dict(query_block=(2, True), grid=(2, 2)), r"query_block=\(2, True\)"),
        (dict(window=4, query_block=4), "cannot be used together"),
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
        (dict(grid_order="diagonal"), "grid_order='diagonal'"),
        (dict(window=3, grid_order="block"), "grid_order='block'"),
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


def test_a_configuration_is_one_static_argument():
    lists = LocalConfig(query_block=[2, 3], grid=[4, 6])
    tuples = LocalConfig(query_block=(2, 3), memory=(2, 3), grid=(4, 6))
    assert lists == tuples and hash(lists) == hash(tuples)
    assert LocalConfig() == LocalConfig(window=128)
    assert LocalConfig(query_block=5).memory == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        tuples.window = 3
