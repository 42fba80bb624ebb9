"""Properties of all operations on queries, keys and values."""

import keras
import numpy as np
import pytest
from keras import ops as keras_ops

from keras_efficient_attn import ops
from tests.autodiff import float64, gradients, to_numpy

HEADS, DIM = 3, 4
CODES = np.random.default_rng(1).normal(size=(HEADS, 5, DIM)).astype("float32")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def qkv(queries=7, keys=7, batch=2, kind="float32"):
    return tuple(
        draw(batch, length, HEADS, DIM, seed=seed).astype(kind)
        for seed, length in enumerate((queries, keys, keys))
    )


def attend_linearly(query, key, value, **options):
    query, key = (keras_ops.square(x) for x in (query, key))
    return ops.linear_attention(query, key, value, **options)


def attend_weighted(query, key, value, **options):
    weight = np.zeros(key.shape[:3], "float32")
    return attend_linearly(query, key, value, key_log_weight=weight, **options)


def attend_in_spans(query, key, value, **options):
    spans = np.array([1.0, 4.0, 9.0], "float32")
    return ops.adaptive_span_attention(query, key, value, spans, window=6, **options)


def attend_relatively(query, key, value, causal=False, **options):
    length, keys = query.shape[1], key.shape[1]
    distances = length if causal else max(0, length + keys - 1)
    position_key = draw(distances, HEADS, DIM, seed=5)
    options = dict(options, causal=causal)
    return ops.relative_attention(query, key, value, position_key, **options)


def attend_by_fourier(query, key, value, **options):
    return ops.fourier.fourier_attention(query, key, value, 0.5, **options)


def attend_to_codes(query, key, value, **options):
    return ops.vq_attention(query, key, value, CODES, **options)


def with_options(function, **fixed):
    return lambda *tensors, **options: function(*tensors, **fixed, **options)


SOFT = dict(sigma=np.array([0.5, 1.0, 1.5], "float32"))
GRID = dict(query_block=(2, 2), grid=(3, 3))
# Attention of queries to keys that a mask keeps.
ATTEND = {
    "linear": attend_linearly,
    "linear, weighted": attend_weighted,
    "local": with_options(ops.local_attention, window=4),
    "local, in blocks": with_options(ops.local_attention, query_block=3),
    "local, in a grid": with_options(ops.local_attention, **GRID),
    "strided": with_options(ops.sparse_attention, stride=3),
    "fixed": with_options(ops.sparse_attention, stride=3, pattern="fixed"),
    "spans": attend_in_spans,
    "relative": attend_relatively,
    "fourier": attend_by_fourier,
    "codes": attend_to_codes,
    "codes, with a window": with_options(attend_to_codes, window=3),
    "codes, expanded": with_options(attend_to_codes, order=2),
    "codes, soft": with_options(attend_to_codes, **SOFT),
}
IMPLEMENTATIONS = [None, "reference"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ATTEND)
def test_without_keys_all_outputs_are_zero(name, causal, implementation):
    options = dict(causal=causal, implementation=implementation)
    for queries in (0, 1, 5):
        output = ATTEND[name](*qkv(queries, 0), **options)
        np.testing.assert_array_equal(to_numpy(output), np.zeros((2, queries, 3, 4)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ATTEND)
def test_masked_keys_are_not_read(name, implementation):
    query, key, value = qkv()
    mask = np.array([[0, 1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1, 0]], bool)
    kept = mask[..., None, None]

    def attend(*tensors):
        return ATTEND[name](*tensors, key_mask=mask, implementation=implementation)

    def loss(*tensors):
        return keras_ops.sum(keras_ops.square(attend(*tensors)))

    results = []
    for hidden in (0.0, np.nan):
        keys, values = (np.where(kept, x, hidden) for x in (key, value))
        slopes = gradients(loss, query, keys, values)
        # The operations of "linear" square the keys, and NaN has no slope.
        results.append([to_numpy(attend(query, keys, values)), slopes[0], slopes[2]])
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(poisoned, clean)


def attend_with_ones(query, key, value, **options):
    query, key = (keras_ops.ones_like(x) for x in (query, key))
    return ops.linear_attention(query, key, value, **options)


def attend_gated(query, key, value, **options):
    rates = dict(log_decay=np.zeros(key.shape[:3], "float32"))
    return attend_with_ones(query, key, value, **rates, **options)


def attend_in_long_spans(query, key, value, window=9, **options):
    spans = np.full(HEADS, 9.0, "float32")
    options = dict(options, window=window, ramp=np.float32(2))
    return ops.adaptive_span_attention(query, key, value, spans, **options)


# Attention to all keys. With queries and keys of 0 they all have the same weight.
# Lengths are those of NumPy: sums and products of such narrow integers overflow.
WIDE = {
    "linear": with_options(attend_with_ones, chunk_size=np.int8(100)),
    "gated": with_options(attend_gated, chunk_size=np.int8(100)),
    "local": with_options(ops.local_attention, window=np.int8(100)),
    "local, in blocks": with_options(ops.local_attention, query_block=np.int8(100)),
    "local, in a grid": with_options(
        ops.local_attention, query_block=(np.int8(90), 2), grid=[np.int64(4), 2]
    ),
    "strided": with_options(ops.sparse_attention, stride=np.int8(100)),
    "fixed": with_options(
        ops.sparse_attention, stride=np.int8(100), summary=np.int8(50), pattern="fixed"
    ),
    "spans": with_options(attend_in_long_spans, window=np.int8(100)),
    "relative": with_options(attend_relatively, window=np.int8(100)),
    "fourier": with_options(attend_by_fourier, chunk_size=np.int8(100)),
    "codes": with_options(attend_to_codes, block_length=np.int8(100)),
    "codes, with a window": with_options(attend_to_codes, window=np.int8(100)),
    "codes, expanded": with_options(attend_to_codes, order=np.int8(2), rank=np.int8(3)),
    "codes, soft": with_options(attend_to_codes, **SOFT),
}
MASKS = (
    np.array([[0, 2, 1, 0, 3, 1, 5], [1, -1, 4, 0, 0, 2, -2]], "int32"),
    np.array([[0, 255, 1, 0, 3, 1, 5], [2] * 7], "uint8"),
    [[0, 1, 1, 0, 1, 1, 1], [True] * 7],
)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", WIDE)
def test_equal_weights_give_the_mean_of_the_keys_seen(name, causal, implementation):
    if name == "gated" and not causal:
        pytest.skip("gates are causal")
    query, key, value = qkv()
    options = dict(causal=causal, implementation=implementation)
    for mask in MASKS:
        output = WIDE[name](0 * query, 0 * key, value, key_mask=mask, **options)
        seen = np.broadcast_to(np.asarray(mask)[:, None] != 0, (2, 7, 7))
        if causal:
            seen = seen & np.tri(7, dtype=bool)
        number = np.maximum(seen.sum(-1), 1)[..., None, None]
        mean = np.einsum("bts,bshv->bthv", seen, value) / number
        np.testing.assert_allclose(to_numpy(output), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["key_mask", [[1, 1], [1]], [["a"] * 7] * 2])
@pytest.mark.parametrize("name", ["linear", "local", "fourier", "codes"])
@pytest.mark.any_backend
def test_a_mask_of_something_else_is_refused(name, mask):
    with pytest.raises(TypeError, match="`key_mask` must be .* Received: key_mask="):
        ATTEND[name](*qkv(), key_mask=mask)


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.any_backend
def test_values_that_are_integers_are_refused(name):
    query, key, value = qkv()
    with pytest.raises(TypeError, match="value.dtype=int32"):
        ATTEND[name](query, key, value.astype("int32"))


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.any_backend
def test_rows_of_another_number_are_refused(name):
    query, key, value = qkv()
    with pytest.raises(ValueError, match=r"must agree in batch, heads and dim"):
        ATTEND[name](query[:1], key, value)


SOFTMAX = ["local", "strided", "spans", "relative"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scale=np.ones(3, "float32")), "`scale` must be a number or None"),
        (dict(dropout=(0.1, 42)), r"of shape \(2,\).* dropout=\(0.1, 42\)"),
        (dict(dropout=(0.1, np.ones((2, 2)))), r"seed of `dropout` .* shape \(2,\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.any_backend
def test_options_of_softmax_that_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        ATTEND[name](*qkv(), **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kinds", [("float16", "float16"), ("float32", "float16")])
@pytest.mark.parametrize("name", ATTEND)
def test_outputs_have_the_dtype_of_the_values(name, kinds, implementation):
    query, key, _ = qkv(kind=kinds[0])
    *_, value = qkv(kind=kinds[1])
    output = ATTEND[name](query, key, value, implementation=implementation)
    assert keras.backend.standardize_dtype(output.dtype) == "float16"


def slopes(name, implementation, kind):
    mask = np.array([[0, 1, 1, 0, 1, 1, 1], [1] * 7], bool)

    def loss(*tensors):
        options = dict(key_mask=mask, implementation=implementation)
        output = ATTEND[name](*tensors, causal=True, **options)
        return keras_ops.sum(keras_ops.square(keras_ops.cast(output, "float32")))

    # Rounded to float16 for every dtype.
    arrays = (x.astype(kind) for x in qkv(kind="float16"))
    return gradients(loss, *arrays)


@pytest.mark.parametrize("name", ATTEND)
def test_definitions_have_the_gradients_of_float32_in_float16(name):
    received, expected = (
        slopes(name, "reference", "float16"),
        slopes(name, None, "float32"),
    )
    for one, other in zip(received, expected, strict=True):
        limit = 5e-3 * np.abs(other).max()
        np.testing.assert_allclose(one.astype("float32"), other, atol=limit)


@pytest.mark.parametrize("name", ATTEND)
def test_definitions_in_float64(name):
    with float64():
        arrays = [
            keras_ops.convert_to_tensor(x, "float64") for x in qkv(kind="float64")
        ]
        received, expected = (
            ATTEND[name](*arrays, causal=True, implementation=implementation)
            for implementation in ("reference", None)
        )
        for output in (received, expected):
            assert keras.backend.standardize_dtype(output.dtype) == "float64"
        np.testing.assert_allclose(to_numpy(received), to_numpy(expected), rtol=1e-9)
