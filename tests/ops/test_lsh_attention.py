import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.documents import Documents
from keras_efficient_attn.ops.lsh_attention import lsh_attention, lsh_attention_state
from keras_efficient_attn.ops.lsh_attention.layout import (
    LSHConfig,
    hash_buckets,
    num_rotation_rows,
)
from keras_efficient_attn.ops.lsh_attention.pairs import prefers_pairs
from tests import dense
from tests.autodiff import float64, gradients, to_numpy

BATCH, LENGTH, HEADS, DIM, ROUNDS, BUCKETS = 2, 23, 2, 5, 3, 4


def arrays(length=LENGTH, rounds=ROUNDS, buckets=BUCKETS, seed=0):
    random = np.random.default_rng(seed)
    query, value = random.normal(size=(2, BATCH, length, HEADS, DIM))
    shape = (BATCH, HEADS, rounds, length)
    ids = random.integers(0, buckets, shape).astype("int32")
    return query.astype("float32"), value.astype("float32"), ids


def expected_output(
    query,
    value,
    buckets,
    chunk_size,
    key_mask=None,
    causal=False,
    aligned=False,
    across_buckets=False,
    scale=1.0,
):
    """Dense attention in float64 to the keys found, for the operation's options."""
    kept = np.ones(query.shape[:2]) if key_mask is None else key_mask
    kept = np.array(kept) != 0
    output = np.zeros(value.shape)
    for b in range(len(query)):
        for h in range(query.shape[2]):
            cut = (chunk_size, aligned, across_buckets)
            seen = dense.lsh_visible(buckets[b, h], kept[b], *cut)
            x = query[b, :, h].astype("float64")
            weights = dense.shared_weights(x, seen, kept[b], causal, scale)
            output[b, :, h] = weights @ value[b, :, h]
    return output


def check(tensors, implementation, ids=None, num_buckets=BUCKETS, rtol=1e-4, **options):
    """Compares with the definition; `ids` are the buckets given to the operation."""
    *inputs, buckets = tensors
    output, _ = lsh_attention(
        *inputs,
        buckets if ids is None else ids,
        num_buckets=num_buckets,
        implementation=implementation,
        **options,
    )
    expected = expected_output(*tensors, **options)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=rtol, atol=rtol / 10)


CUTS = [
    dict(aligned=False, across_buckets=False),
    dict(aligned=True, across_buckets=False),
    dict(aligned=False, across_buckets=True),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_all_rounds_together_are_dense_attention_over_their_union(
    implementation, causal, cut
):
    kept = np.random.default_rng(1).random((BATCH, LENGTH)) > 0.3
    options = dict(chunk_size=3, causal=causal, key_mask=kept, scale=0.7)
    check(arrays(), implementation, **options, **cut)


def test_pairs_in_float64():
    query, value, buckets = arrays()
    tensors = query.astype("float64"), value.astype("float64"), buckets
    with float64():
        check(tensors, "pairs", rtol=1e-9, chunk_size=3, causal=True, aligned=True)


@pytest.mark.parametrize("causal", [False, True])
def test_two_chunks_are_dense_attention_whatever_the_hash(causal):
    query, value, buckets = arrays(length=12)
    output, _ = lsh_attention(
        query,
        value,
        buckets,
        num_buckets=BUCKETS,
        chunk_size=6,
        causal=causal,
        across_buckets=True,
        implementation="chunked",
    )
    everything, kept = np.ones((12, 12), bool), np.ones(12, bool)
    for b in range(BATCH):
        for h in range(HEADS):
            weights = dense.shared_weights(
                query[b, :, h].astype("float64"), everything, kept, causal, 1.0
            )
            np.testing.assert_allclose(
                to_numpy(output)[b, :, h],
                weights @ value[b, :, h],
                rtol=1e-4,
                atol=1e-5,
            )


@pytest.mark.parametrize("fast", ["chunked", "pairs"])
@pytest.mark.parametrize("aligned", [False, True])
def test_gradients_are_those_of_the_reference(aligned, fast):
    query, value, buckets = arrays()
    weight = np.random.default_rng(2).normal(size=value.shape).astype("float32")

    def loss(implementation):
        def function(query, value):
            output, _ = lsh_attention(
                query,
                value,
                ops.convert_to_tensor(buckets),
                num_buckets=BUCKETS,
                chunk_size=3,
                causal=aligned,
                aligned=aligned,
                implementation=implementation,
            )
            return ops.sum(ops.multiply(output, weight))

        return gradients(function, query, value)

    for received, expected in zip(loss(fast), loss("reference"), strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_in_several_blocks(causal):
    query, value, buckets = arrays(length=531, rounds=2)
    kept = np.random.default_rng(1).random((BATCH, 531)) > 0.3
    options = dict(chunk_size=20, key_mask=kept, causal=causal, aligned=causal)
    check((query, value, buckets), "pairs", **options)

    def attend(query, value, implementation):
        output, _ = lsh_attention(
            query,
            value,
            ops.convert_to_tensor(buckets),
            num_buckets=BUCKETS,
            implementation=implementation,
            **options,
        )
        return output

    def loss(implementation):
        def function(query, value):
            return ops.sum(ops.square(attend(query, value, implementation)))

        return gradients(function, query, value)

    for received, wanted in zip(loss("pairs"), loss("chunked"), strict=True):
        np.testing.assert_allclose(received, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.any_backend
@pytest.mark.usefixtures("on_cpu")
def test_short_sequences_take_pairs(backend):
    """By the pairs that each computes, for the usual options and some rare ones."""

    def takes(length, rounds=4, **options):
        config = LSHConfig(**{"num_buckets": 32, "chunk_size": 64, **options})
        query = np.zeros((1, length, 4, 8), "float32")
        return prefers_pairs(ops.convert_to_tensor(query), rounds, config)

    causal = dict(causal=True, aligned=True)
    assert takes(1024, **causal) and not takes(8192, **causal)
    # Few rounds, and small chunks, compute few pairs.
    assert not takes(3000, rounds=1, **causal)
    assert not takes(3000, chunk_size=16, **causal)
    # The limits of the operation's docstring.
    plain, aligned = (3072, 3882) if backend == "tensorflow" else (2048, 2797)
    assert takes(plain, causal=True) and not takes(plain + 1, causal=True)
    assert takes(aligned, **causal) and not takes(aligned + 1, **causal)


@pytest.mark.usefixtures("on_cpu")
def test_pairs_of_many_rows_would_take_much_memory(backend):
    config = LSHConfig(32, 64, causal=True, aligned=True)
    query = ops.convert_to_tensor(np.zeros((64, 1024, 4, 1), "float32"))
    # PyTorch's kernel for CPUs computes row by row.
    assert prefers_pairs(query, 4, config) == (backend == "torch")


def test_pairs_of_a_length_that_a_graph_does_not_know(backend):
    if backend != "tensorflow":
        pytest.skip("only TensorFlow traces unknown lengths")
    import tensorflow as tf

    query, value, buckets = arrays()
    options = dict(chunk_size=3, causal=True, aligned=True)

    def trace(implementation):
        @tf.function(input_signature=[tf.TensorSpec((None, None, HEADS, DIM))] * 2)
        def attend(query, value):
            given = dict(num_buckets=BUCKETS, implementation=implementation)
            return lsh_attention(query, value, buckets, **given, **options)[0]

        return attend(query, value)

    expected = expected_output(query, value, buckets, **options)
    np.testing.assert_allclose(to_numpy(trace(None)), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="needs inputs of a fixed length"):
        trace("pairs")


@pytest.mark.parametrize("implementation", ["chunked", "pairs"])
def test_numbers_of_chunks_that_later_positions_decide_change_no_earlier_bit(
    implementation,
):
    """Later positions in one bucket fill its chunks; spread out, they need others."""
    length, half = 120, 60
    query, value, buckets = arrays(length, buckets=16)
    together = buckets.copy()
    together[..., half:] = 1
    spread, packed = (
        to_numpy(
            lsh_attention(
                query,
                value,
                ids,
                num_buckets=16,
                chunk_size=8,
                causal=True,
                aligned=True,
                implementation=implementation,
            )[0]
        )
        for ids in (buckets, together)
    )
    np.testing.assert_array_equal(spread[:, :half], packed[:, :half])
    assert np.any(spread[:, half:] != packed[:, half:])


def test_chunks_that_run_on_across_buckets_let_the_future_through():
    # Why `aligned` exists: bucket 0 has one more position at the end, and all
    # chunks of bucket 1 move.
    query, value, _ = arrays(length=8)
    buckets = np.broadcast_to(np.int32([1, 1, 1, 1, 0, 0, 0, 0]), (2, 2, 1, 8)).copy()
    moved = buckets.copy()
    moved[..., -1] = 1
    outputs = [
        to_numpy(
            lsh_attention(query, value, ids, num_buckets=2, chunk_size=2, causal=True)[
                0
            ]
        )
        for ids in (buckets, moved)
    ]
    assert np.any(outputs[0][:, :-1] != outputs[1][:, :-1])


@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_sort_keys_have_all_of_32_bits(implementation):
    tensors = query, value, buckets = arrays()
    kept = np.random.default_rng(1).random((BATCH, LENGTH)) > 0.3
    # The last sort key, of hidden positions in the last bucket, is 2^31 - 9.
    num_buckets = 178_956_968
    spread = buckets * ((num_buckets - 1) // (BUCKETS - 1))
    spread = np.where(buckets == BUCKETS - 1, num_buckets - 1, spread)
    options = dict(chunk_size=3, across_buckets=True, key_mask=kept)
    options["implementation"] = implementation
    check(tensors, ids=spread.astype("int32"), num_buckets=num_buckets, **options)
    with pytest.raises(ValueError, match="num_buckets=178956969"):
        lsh_attention(query, value, buckets, num_buckets=num_buckets + 1, **options)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_narrow_integers_hold_buckets(implementation, kind):
    """The sort multiplies buckets by the length: 1,600 here."""
    tensors = arrays(200, rounds=2, buckets=8)
    options = dict(num_buckets=8, chunk_size=16, causal=True, aligned=True)
    check(tensors, implementation, ids=tensors[2].astype(kind), **options)


def test_narrow_integers_hold_buckets_of_documents_and_streams():
    query, value, buckets = arrays(200, rounds=2, buckets=8)
    cut = dict(chunk_size=16, causal=True, aligned=True)
    expected = expected_output(query, value, buckets, **cut)
    narrow = ops.convert_to_tensor(buckets.astype("uint8"))
    documents = Documents.of(ops.zeros((BATCH, 200), "int32"))
    options = dict(num_buckets=8, **cut)
    output, _ = lsh_attention(query, value, narrow, documents=documents, **options)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    state = lsh_attention_state(
        batch_size=BATCH,
        num_heads=HEADS,
        rounds=2,
        num_buckets=8,
        chunk_size=16,
        dim=DIM,
        value_dim=DIM,
    )
    with pytest.raises(ValueError, match="leave out `state`.*Received: state"):
        lsh_attention(query, value, narrow, documents=documents, state=state, **options)
    output, _ = lsh_attention(query, value, narrow, state=state, **options)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_a_mask_of_integers_keeps_what_is_not_zero(implementation):
    mask = np.random.default_rng(1).integers(-1, 3, (BATCH, LENGTH))
    options = dict(num_buckets=np.int8(BUCKETS), chunk_size=np.int8(3))
    check(arrays(), implementation, key_mask=mask.tolist(), **options)


def test_a_stream_is_exported_for_any_batch_size(backend):
    if backend != "jax":
        pytest.skip("JAX alone exports a symbolic size")
    import jax

    query, value, buckets = arrays()
    options = dict(chunk_size=3, causal=True, aligned=True)

    def attend(query, value, buckets, state):
        given = dict(num_buckets=BUCKETS, state=state)
        return lsh_attention(query, value, buckets, **given, **options)[0]

    sizes = BATCH, HEADS, ROUNDS, BUCKETS, 3, DIM, DIM
    arguments = query, value, buckets, lsh_attention_state(*sizes)
    (rows,) = jax.export.symbolic_shape("rows")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), arguments
    )
    exported = jax.export.export(jax.jit(attend))(*shapes)
    expected = expected_output(query, value, buckets, **options)
    np.testing.assert_allclose(
        exported.call(*arguments), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("implementation", ["chunked", "pairs"])
def test_chunks_of_many_buckets_are_told_apart(implementation):
    # Two long buckets; float32 has to distinguish their chunk numbers.
    length, num_buckets = 64, 2**20
    query, value, buckets = arrays(length, buckets=2)
    # One row and head: the work grows with the buckets.
    query, value = query[:1, :, :1], value[:1, :, :1]
    buckets = buckets[:1, :1] + num_buckets // 2
    options = dict(chunk_size=1, causal=True, aligned=True)
    check((query, value, buckets), implementation, num_buckets=num_buckets, **options)
    query, value, buckets = arrays(length=1)
    with pytest.raises(ValueError, match="num_buckets=16777216, across_buckets=False"):
        lsh_attention(query, value, buckets, num_buckets=2**24, **options)


def test_buckets_are_the_largest_signed_projection():
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH, LENGTH, HEADS, DIM)).astype("float32")
    factors = (4, 2, 6)
    shape = (ROUNDS, HEADS, DIM, num_rotation_rows(factors))
    rotations = random.normal(size=shape).astype("float32")
    buckets = to_numpy(hash_buckets(ops.convert_to_tensor(x), rotations, factors))
    assert buckets.shape == (BATCH, HEADS, ROUNDS, LENGTH)
    for h in range(HEADS):
        for r in range(ROUNDS):
            expected = dense.angular_buckets(x[:, :, h], rotations[r, h], factors)
            np.testing.assert_array_equal(buckets[:, h, r], expected)
    assert len(np.unique(buckets)) > 24


@pytest.mark.parametrize("angle", [0.3, 1.2, 2.5])
def test_two_buckets_part_vectors_with_the_probability_of_their_angle(angle):
    rounds = 4000
    x = np.zeros((1, 2, 1, 2), "float32")
    x[0, :, 0] = [[1, 0], [np.cos(angle), np.sin(angle)]]
    rotations = keras.random.normal((rounds, 1, 2, 1), seed=3)
    buckets = to_numpy(hash_buckets(ops.convert_to_tensor(x), rotations, (2,)))[0, 0]
    parted = np.mean(buckets[:, 0] != buckets[:, 1])
    probability = angle / np.pi
    deviation = np.sqrt(probability * (1 - probability) / rounds)
    assert abs(parted - probability) < 4 * deviation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(value=np.ones((BATCH, LENGTH, 1, DIM))), r"value.shape=\(2, 23, 1, 5\)"),
        (dict(value=np.ones((1, LENGTH, HEADS, DIM))), r"value.shape=\(1, 23, 2, 5\)"),
        (dict(buckets=np.ones((BATCH, HEADS, LENGTH))), r"buckets.shape=\(2, 2, 23\)"),
        (
            dict(buckets=np.ones((BATCH, 1, ROUNDS, LENGTH))),
            r"= \(2, 2, 3, 23\). Received: buckets.shape=\(2, 1, 3, 23\)",
        ),
        (dict(key_mask=np.ones((1, LENGTH))), r"key_mask.shape=\(1, 23\)"),
        (
            dict(dropout_mask=np.ones((BATCH, HEADS, ROUNDS, 3, 3))),
            r"dropout_mask.shape=\(2, 2, 3, 3, 3\)",
        ),
        (dict(scale=np.ones(2)), "`scale` must be a number"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
@pytest.mark.any_backend
def test_shapes_that_do_not_agree(changes, message):
    query, value, buckets = arrays()
    arguments = dict(query=query, value=value, buckets=buckets) | changes
    with pytest.raises(ValueError, match=message):
        lsh_attention(num_buckets=BUCKETS, chunk_size=3, **arguments)


def test_invalid_arguments():
    query, value, buckets = arrays()
    options = dict(num_buckets=BUCKETS, chunk_size=3)
    with pytest.raises(ValueError, match="implementation='fast'"):
        lsh_attention(query, value, buckets, implementation="fast", **options)
    with pytest.raises(ValueError, match="causal=True, aligned=False"):
        lsh_attention(query, value, buckets, causal=True, state={}, **options)
    with pytest.raises(ValueError, match="does not support `state` or `dropout_mask`"):
        lsh_attention(
            query,
            value,
            buckets,
            implementation="reference",
            dropout_mask=np.ones((BATCH, HEADS, ROUNDS, 3, 6)),
            **options,
        )
    with pytest.raises(ValueError, match="'pairs' does not support `state`"):
        lsh_attention(
            query,
            value,
            buckets,
            implementation="pairs",
            dropout_mask=np.ones((BATCH, HEADS, ROUNDS, 3, 6)),
            **options,
        )
