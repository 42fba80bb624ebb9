"""The patterns of Sparse Transformers, and their outputs."""

import functools

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import (
    sparse_attention,
    sparse_attention_state,
    sparse_pattern,
)
from tests.autodiff import gradient_function, to_numpy
from tests.largest_tensor import largest_tensor, temporary_bytes
from tests.ops import pieces
from tests.ops.pieces import (
    SIZES,
    TOLERANCE,
    check_masked_softmax,
    draw_mask,
    draw_with_hidden_keys,
    masked_softmax,
    read_in_pieces,
    read_masked_pieces,
)

# Drawn by hand from the sets of the paper: 9 positions, a stride of 3.
DRAWN = {
    ("strided", 0): """
        #........
        ##.......
        ###......
        ####.....
        .####....
        ..####...
        ...####..
        ....####.
        .....####""",
    ("strided", 1): """
        #........
        .#.......
        ..#......
        #..#.....
        .#..#....
        ..#..#...
        #..#..#..
        .#..#..#.
        ..#..#..#""",
    ("strided", "merged"): """
        #........
        ##.......
        ###......
        ####.....
        .####....
        ..####...
        #..####..
        .#..####.
        ..#..####""",
    ("fixed", 0): """
        #........
        ##.......
        ###......
        ...#.....
        ...##....
        ...###...
        ......#..
        ......##.
        ......###""",
    ("fixed", 1): """
        .........
        .........
        ..#......
        ..#......
        ..#......
        ..#..#...
        ..#..#...
        ..#..#...
        ..#..#..#""",
    ("fixed", "merged"): """
        #........
        ##.......
        ###......
        ..##.....
        ..###....
        ..####...
        ..#..##..
        ..#..###.
        ..#..####""",
}
PATTERNS = [
    dict(pattern=pattern, stride=5, summary=summary, factors=factors)
    for pattern, summary in (("strided", 1), ("fixed", 2))
    # Split heads have one factor each.
    for factors in ("merged", "split")
]
heads_of = functools.partial(pieces.heads_of, heads=3)


def pattern_id(pattern):
    return f"{pattern['pattern']}-{pattern['factors']}"


def draw(text):
    return np.array([[c == "#" for c in line] for line in text.split()])


@pytest.mark.parametrize(("pattern", "factors"), DRAWN, ids=str)
def test_patterns_are_those_drawn_by_hand(pattern, factors):
    matrix = sparse_pattern(9, pattern, stride=3, factors=factors)
    np.testing.assert_array_equal(matrix[0], draw(DRAWN[pattern, factors]))


def test_without_causality_patterns_look_both_ways():
    for pattern in ("strided", "fixed"):
        full = sparse_pattern(17, pattern, stride=4, causal=False)[0]
        causal = sparse_pattern(17, pattern, stride=4)[0]
        np.testing.assert_array_equal(np.tril(full), causal)
        assert full[np.triu_indices(17, 1)].any()


def test_heads_have_summaries_of_their_own():
    matrices = sparse_pattern(
        12, "fixed", stride=6, summary=2, factors=1, num_heads=4, causal=False
    )
    columns = [np.flatnonzero(matrix[0]).tolist() for matrix in matrices]
    assert columns == [[4, 5, 10, 11], [2, 3, 8, 9], [0, 1, 6, 7], [4, 5, 10, 11]]


def test_split_heads_take_different_factors():
    split = sparse_pattern(20, "fixed", stride=5, factors="split", num_heads=3)
    near, far = (
        sparse_pattern(20, "fixed", stride=5, factors=factor, num_heads=2)
        for factor in (0, 1)
    )
    np.testing.assert_array_equal(split, np.stack([near[0], near[1], far[0]]))


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("length", [16, 23])
def test_every_pair_is_connected_within_p_plus_1_positions(pattern, length):
    # Paths of p = 2 steps, with p + 1 positions.
    merged = sparse_pattern(length, pattern, stride=4)[0].astype(int)
    every = np.tril(np.ones_like(merged)) > 0
    np.testing.assert_array_equal(merged @ merged > 0, every)
    # One step through each factor, in alternating layers.
    first, second = (
        sparse_pattern(length, pattern, stride=4, factors=factor)[0].astype(int)
        for factor in (0, 1)
    )
    product = (first @ second if pattern == "strided" else second @ first) > 0
    if pattern == "strided":
        np.testing.assert_array_equal(product, every)
    else:
        # Positions of the same block outside the summary need the first step only.
        np.testing.assert_array_equal(product | (first > 0), every)
    assert not np.array_equal(merged > 0, every)


@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_masked_softmax(pattern, causal):
    length = 37
    tensors = heads_of(length), heads_of(length, seed=1), heads_of(length, 5)
    weight, mask = heads_of(length, 5, seed=4), draw_mask(length)
    allowed = sparse_pattern(length, **pattern, num_heads=3, causal=causal)

    def attend(*tensors):
        options = dict(key_mask=mask, causal=causal, scale=0.7)
        return sparse_attention(*tensors, **pattern, **options)

    check_masked_softmax(attend, tensors, allowed, weight, mask, scale=0.7)


@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
def test_reference_and_lengths_that_differ(pattern):
    for lengths, causal in (((4, 13), False), ((13, 4), True)):
        query, key = heads_of(lengths[0]), heads_of(lengths[1], seed=1)
        value = heads_of(lengths[1], 5, seed=2)
        output, expected = (
            sparse_attention(
                query, key, value, causal=causal, implementation=name, **pattern
            )
            for name in ("blocks", "reference")
        )
        np.testing.assert_allclose(
            to_numpy(output), to_numpy(expected), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "pattern",
    [
        *PATTERNS,
        # A stride longer than the sequence, each factor separately.
        *(
            dict(pattern=name, stride=stride, factors=factors)
            for name in ("strided", "fixed")
            for stride, factors in ((40, "merged"), (5, 0), (5, 1))
        ),
    ],
    ids=str,
)
def test_tokens_and_segments_are_the_whole(pattern, sizes):
    length = 23
    *tensors, mask = draw_with_hidden_keys(length, heads=3)
    state = sparse_attention_state(2, 3, 4, 5, length, **pattern)
    attention = functools.partial(sparse_attention, **pattern)
    sizes = SIZES[sizes](length)
    output, _ = read_masked_pieces(attention, state, tensors, mask, sizes)
    allowed = sparse_pattern(length, **pattern, num_heads=3)
    allowed = allowed & mask[:, None, None]
    clean = [np.nan_to_num(x) for x in tensors]
    expected = masked_softmax(*clean, allowed, scale=0.5)
    np.testing.assert_allclose(output, expected, **TOLERANCE)


@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
@pytest.mark.parametrize("size", [1, 12])
def test_outputs_beyond_the_cache_are_nan(pattern, size):
    # Capacity for 10 positions, in blocks of 5.
    state, x = sparse_attention_state(2, 3, 4, 4, 8, **pattern), heads_of(12)

    def attend(x, state):
        return sparse_attention(x, x, x, causal=True, state=state, **pattern)

    output, _ = read_in_pieces(attend, state, (x,), (size,) * (12 // size))
    first = 10 if size == 1 else 0
    assert np.isfinite(output[:, :first]).all() and np.isnan(output[:, first:]).all()


@pytest.mark.parametrize("name", ["strided", "fixed"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_has_the_size_of_the_matrix(name, causal):
    length, stride = 1024, 32
    x = np.ones((1, length, 1, 4), "float32")

    def loss(x):
        output = sparse_attention(x, x, x, pattern=name, stride=stride, causal=causal)
        return ops.sum(ops.square(output))

    assert largest_tensor(loss, x) < length**2 / 4


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_memory_grows_as_length_to_the_power_of_one_and_a_half(name, backend):
    if backend != "jax":
        pytest.skip("only JAX tells how much memory a compiled program takes")
    import jax

    def bytes_of(stride):
        def loss(x):
            output = sparse_attention(x, x, x, pattern=name, stride=stride, causal=True)
            return ops.sum(ops.square(output))

        x = np.zeros((1, stride**2, 1, 4), "float32")
        return temporary_bytes(jax.grad(loss), x)

    assert bytes_of(64) < 1.2 * 8 * bytes_of(32)


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_a_streamed_token_costs_the_root_of_the_context(name, backend):
    if backend != "jax":
        pytest.skip("only JAX tells the operations of a compiled program")
    import jax

    def operations(stride):
        pattern = dict(pattern=name, stride=stride)
        state = sparse_attention_state(1, 1, 4, 4, stride**2, **pattern)
        x = np.zeros((1, 1, 1, 4), "float32")

        def step(x, state):
            return sparse_attention(x, x, x, causal=True, state=state, **pattern)

        compiled = jax.jit(step).lower(x, state).compile()
        return compiled.cost_analysis()["flops"]

    # 16 times the context.
    assert operations(64) < 1.5 * 4 * operations(16)


def test_dropped_weights_are_zero_and_the_others_larger():
    length, rate = 48, 0.4
    x = heads_of(length)
    one_hot = np.broadcast_to(
        np.eye(length, dtype="float32")[None, :, None], (2, length, 3, length)
    )
    arguments = dict(pattern="fixed", stride=8, causal=True)
    weights = to_numpy(sparse_attention(x, x, one_hot, **arguments))
    dropped = to_numpy(
        sparse_attention(
            x,
            x,
            one_hot,
            dropout=(rate, np.array([1.0, 2.0], "float32")),
            **arguments,
        )
    )
    seen = weights > 0
    kept = dropped != 0
    assert not np.any(kept & ~seen)
    np.testing.assert_allclose(dropped[kept], weights[kept] / (1 - rate), rtol=1e-5)
    share = 1 - kept[seen].mean()
    assert abs(share - rate) < 4 * np.sqrt(rate * (1 - rate) / seen.sum())


def test_gradients_drop_the_same_weights():
    # Linear in the values: the gradient shows which weights were kept.
    length = 20
    x, value = heads_of(length), heads_of(length, 5, seed=1)
    weight = heads_of(length, 5, seed=2)

    def loss(value):
        output = sparse_attention(
            x,
            x,
            value,
            stride=4,
            dropout=(0.5, ops.convert_to_tensor([3.0, 4.0])),
        )
        return ops.sum(ops.multiply(output, weight))

    graded = gradient_function(loss, with_value=True)
    total, gradient = graded(value)
    np.testing.assert_allclose((gradient * value).sum(), total, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pattern="dense"), "pattern='dense'"),
        (dict(stride=0), "stride=0"),
        (dict(stride=True), "stride=True"),
        (dict(pattern="fixed", summary=True), "summary=True"),
        (dict(pattern="fixed", summary=9), "summary=9, stride=8"),
        (dict(summary=2), "summary=2, pattern='strided'"),
        (dict(pattern="fixed", summary=2, factors=0), "summary=2, factors=0"),
        (dict(factors=2), "factors=2"),
        (dict(factors=1.0), "factors=1.0"),
        (dict(factors=True), "factors=True"),
        (dict(factors="split", query=heads_of(4, heads=1)), "num_heads=1"),
        (dict(query=heads_of(4)[0]), r"query.shape=\(4, 3, 4\)"),
        (dict(key=heads_of(4, 5)), "agree in batch, heads and dim"),
        (dict(value=heads_of(5)), "agree in batch, length"),
        (dict(key_mask=np.ones((2, 9), bool)), r"key_mask.shape=\(2, 9\)"),
        (dict(implementation="dense"), "implementation='dense'"),
        (dict(dropout=0.5), "dropout=0.5"),
        (dict(dropout=(1.0, (1.0, 2.0))), "below 1"),
        (dict(dropout=(True, (1.0, 2.0))), "dropout=.True"),
        (
            dict(implementation="reference", dropout=(0.5, (1.0, 2.0))),
            "or `dropout`. Received: dropout",
        ),
        (dict(state={}), "causal=False"),
        (dict(state={}, causal=True, query=heads_of(1)), "same length"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    x = options.get("query", heads_of(4))
    if x.ndim == 4 and x.shape[2] == 1:
        options = {**options, "key": x, "value": x}
    arguments = dict(query=x, key=heads_of(4), value=heads_of(4), stride=8)
    with pytest.raises(ValueError, match=message):
        sparse_attention(**{**arguments, **options})


def test_a_state_needs_room():
    with pytest.raises(ValueError, match="max_length"):
        sparse_attention_state(1, 1, 4, 4, 0, stride=3)
