import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.documents import Documents
from keras_efficient_attn.ops.lsh_attention import lsh_attention, lsh_attention_state
from keras_efficient_attn.ops.lsh_attention.api import lsh_attention_by_document
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
    query, value, buckets, kept, chunk_size, causal, aligned, across=False, scale=1.0
):
    output = np.zeros(value.shape)
    for b in range(len(query)):
        for h in range(query.shape[2]):
            cut = (chunk_size, aligned, across)
            seen = dense.lsh_visible(buckets[b, h], kept[b], *cut)
            x = query[b, :, h].astype("float64")
            weights = dense.shared_weights(x, seen, kept[b], causal, scale)
            output[b, :, h] = weights @ value[b, :, h]
    return output


CUTS = [
    dict(aligned=False, across=False),
    dict(aligned=True, across=False),
    dict(aligned=False, across=True),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_all_rounds_together_are_dense_attention_over_their_union(
    implementation, causal, cut
):
    query, value, buckets = arrays()
    kept = np.random.default_rng(1).random((BATCH, LENGTH)) > 0.3
    options = dict(chunk_size=3, causal=causal, scale=0.7)
    output, _ = lsh_attention(
        query,
        value,
        buckets,
        num_buckets=BUCKETS,
        key_mask=kept,
        implementation=implementation,
        aligned=cut["aligned"],
        across_buckets=cut["across"],
        **options,
    )
    expected = expected_output(query, value, buckets, kept, **options, **cut)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


def test_pairs_in_float64():
    with float64():
        query, value, buckets = arrays()
        options = dict(chunk_size=3, causal=True, aligned=True)
        tensors = (ops.convert_to_tensor(t, "float64") for t in (query, value))
        output, _ = lsh_attention(
            *tensors,
            buckets,
            num_buckets=BUCKETS,
            implementation="pairs",
            **options,
        )
        kept = np.ones((BATCH, LENGTH), bool)
        expected = expected_output(query, value, buckets, kept, **options)
        np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-9, atol=1e-10)


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
    options = dict(chunk_size=20, causal=causal, aligned=causal)

    def attend(query, value, implementation):
        output, _ = lsh_attention(
            query,
            value,
            ops.convert_to_tensor(buckets),
            num_buckets=BUCKETS,
            key_mask=kept,
            implementation=implementation,
            **options,
        )
        return output

    output = to_numpy(attend(query, value, "pairs"))
    expected = expected_output(query, value, buckets, kept, **options)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)

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
    options = dict(num_buckets=BUCKETS, chunk_size=3, causal=True, aligned=True)

    def trace(implementation):
        @tf.function(input_signature=[tf.TensorSpec((None, None, HEADS, DIM))] * 2)
        def attend(query, value):
            return lsh_attention(
                query, value, buckets, implementation=implementation, **options
            )[0]

        return attend(query, value)

    kept = np.ones((BATCH, LENGTH), bool)
    del options["num_buckets"]
    expected = expected_output(query, value, buckets, kept, **options)
    options["num_buckets"] = BUCKETS
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
    query, value, buckets = arrays()
    kept = np.random.default_rng(1).random((BATCH, LENGTH)) > 0.3
    # The last sort key, of hidden positions in the last bucket, is 2^31 - 9.
    num_buckets = 178_956_968
    spread = buckets * ((num_buckets - 1) // (BUCKETS - 1))
    spread = np.where(buckets == BUCKETS - 1, num_buckets - 1, spread)
    options = dict(
        chunk_size=3, across_buckets=True, key_mask=kept, implementation=implementation
    )
    output, _ = lsh_attention(
        query, value, spread.astype("int32"), num_buckets=num_buckets, **options
    )
    expected = expected_output(
        query, value, buckets, kept, 3, False, False, across=True
    )
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="num_buckets=178956969"):
        lsh_attention(query, value, buckets, num_buckets=num_buckets + 1, **options)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_narrow_integers_hold_buckets(implementation, kind):
    """The sort multiplies buckets by the length: 1,600 here."""
    query, value, buckets = arrays(200, rounds=2, buckets=8)
    cut = dict(chunk_size=16, causal=True, aligned=True)
    output, _ = lsh_attention(
        query,
        value,
        buckets.astype(kind),
        num_buckets=8,
        implementation=implementation,
        **cut,
    )
    expected = expected_output(
        query, value, buckets, np.ones((BATCH, 200), bool), **cut
    )
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


def test_narrow_integers_hold_buckets_of_documents_and_streams():
    query, value, buckets = arrays(200, rounds=2, buckets=8)
    kept, cut = (
        np.ones((BATCH, 200), bool),
        dict(chunk_size=16, causal=True, aligned=True),
    )
    expected = expected_output(query, value, buckets, kept, **cut)
    narrow = ops.convert_to_tensor(buckets.astype("uint8"))
    documents = Documents.of(ops.zeros((BATCH, 200), "int32"))
    config = LSHConfig(8, **cut)
    output = lsh_attention_by_document(query, value, narrow, None, documents, config)
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
    options = dict(num_buckets=8, state=state, **cut)
    output, _ = lsh_attention(query, value, narrow, **options)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["chunked", "pairs", "reference"])
def test_a_mask_of_integers_keeps_what_is_not_zero(implementation):
    query, value, buckets = arrays()
    mask = np.random.default_rng(1).integers(-1, 3, (BATCH, LENGTH))
    output, _ = lsh_attention(
        query,
        value,
        buckets,
        num_buckets=np.int8(BUCKETS),
        chunk_size=np.int8(3),
        key_mask=mask.tolist(),
        implementation=implementation,
    )
    expected = expected_output(query, value, buckets, mask != 0, 3, False, False)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


def test_a_stream_is_exported_for_any_batch_size(backend):
    if backend != "jax":
        pytest.skip("JAX alone exports a symbolic size")
    import jax

    query, value, buckets = arrays()
    options = dict(num_buckets=BUCKETS, chunk_size=3, causal=True, aligned=True)

    def attend(query, value, buckets, state):
        return lsh_attention(query, value, buckets, state=state, **options)[0]

    sizes = BATCH, HEADS, ROUNDS, BUCKETS, 3, DIM, DIM
    arguments = query, value, buckets, lsh_attention_state(*sizes)
    (rows,) = jax.export.symbolic_shape("rows")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), arguments
    )
    exported = jax.export.export(jax.jit(attend))(*shapes)
    del options["num_buckets"]
    kept = np.ones((BATCH, LENGTH), bool)
    expected = expected_output(query, value, buckets, kept, **options)
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
    output, _ = lsh_attention(
        query,
        value,
        buckets,
        num_buckets=num_buckets,
        implementation=implementation,
        **options,
    )
    kept = np.ones((1, length), bool)
    expected = expected_output(query, value, buckets, kept, **options, scale=1.0)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
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
