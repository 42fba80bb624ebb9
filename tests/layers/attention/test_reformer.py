import dataclasses

import keras
import numpy as np
import pytest

from keras_efficient_attn import ReformerLSHAttention
from keras_efficient_attn.ops.common.plan import BLOCK_SIZES
from tests import dense
from tests.autodiff import to_numpy
from tests.layers.streams import stream

SMALL = dict(num_heads=2, key_dim=4, bucket_size=2, num_buckets=4, seed=1)


def inputs(length=21, batch=2, dim=6):
    x = np.random.default_rng(0).normal(size=(batch, length, dim))
    return x.astype("float32")


def built(x, **options):
    layer = ReformerLSHAttention(**{**SMALL, **options})
    layer.build(x.shape, x.shape)
    return layer


def test_there_is_one_projection_for_queries_and_keys():
    x = inputs()
    layer = built(x)
    names = [weight.path.split("/", 1)[1] for weight in layer.trainable_weights]
    assert names == [
        f"{name}/{kind}"
        for name in ("query", "value", "attention_output")
        for kind in ("kernel", "bias")
    ]
    assert layer.key_dense is layer.query_dense
    assert isinstance(layer, keras.layers.MultiHeadAttention)


@pytest.mark.parametrize("use_bias", [False, True])
def test_weights_of_multi_head_attention_load_but_for_the_key(use_bias):
    x = inputs()
    layer = built(x, use_bias=use_bias)
    theirs = keras.layers.MultiHeadAttention(2, 4, use_bias=use_bias)
    theirs.build(x.shape, x.shape)
    own = [weight + 1 for weight in layer.get_weights()]
    layer.set_weights(own)
    for weight, expected in zip(layer.get_weights(), own, strict=True):
        np.testing.assert_array_equal(weight, expected)
    layer.set_weights(theirs.get_weights())
    for ours, source in (
        (layer.query_dense, theirs.query_dense),
        (layer.value_dense, theirs.value_dense),
        (layer.output_dense, theirs.output_dense),
    ):
        np.testing.assert_array_equal(ours.kernel, source.kernel)


def test_the_number_of_rounds_is_that_of_the_call():
    x = inputs()
    layer, other = built(x, num_hashes=2), built(x, num_hashes=5)
    other.set_weights(layer.get_weights())
    output = layer(x, x, use_causal_mask=True, num_hashes=5)
    expected, _ = dense.layer_output(other, dense.reformer_heads, x, x, causal=True)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    symbolic = keras.Input((None, 6))
    model = keras.Model(
        symbolic, layer(symbolic, symbolic, use_causal_mask=True, num_hashes=5)
    )
    np.testing.assert_allclose(to_numpy(model(x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, causal",
    [
        (dict(num_local_heads=1, num_buckets=(2, 4), scale_logits=False), True),
        (dict(aligned=True, num_hashes=1), False),
        (dict(aligned=False, num_hashes=3), True),
        (dict(across_buckets=True, num_local_heads=1), False),
    ],
    ids=str,
)
def test_every_option_is_that_of_the_dense_definition(options, causal):
    x = inputs()
    layer = built(x, **options)
    mask = np.random.default_rng(1).random(x.shape[:2]) > 0.2
    output = layer(x, x, key_mask=mask, use_causal_mask=causal)
    expected, _ = dense.layer_output(
        layer, dense.reformer_heads, x, x, key_mask=mask, causal=causal
    )
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


def test_local_heads_stream():
    x = inputs()
    layer = built(x, num_local_heads=1)
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    streamed, _ = stream(layer, x, (7, 7, 7))
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-5)


def dense_output(layer, x, causal):
    def heads(layer, query, key, value, query_mask=None, key_mask=None, causal=False):
        seen, kept = np.ones((len(x[0]),) * 2, bool), np.ones(len(x[0]), bool)
        weights = np.stack(
            [
                [
                    dense.shared_weights(row[:, h], seen, kept, causal, 0.5)
                    for h in range(2)
                ]
                for row in key
            ]
        )
        return np.einsum("bhts,bshv->bthv", weights, value), weights

    return dense.layer_output(layer, heads, x, x, causal=causal)[0]


def test_dense_below_a_length():
    x = inputs()
    layer = built(x, dense_length=20)
    expected, _ = dense.layer_output(layer, dense.reformer_heads, x, x, causal=True)
    np.testing.assert_allclose(
        to_numpy(layer(x, x, use_causal_mask=True)), expected, rtol=1e-4, atol=1e-5
    )
    x = x[:, 1:]
    np.testing.assert_allclose(
        to_numpy(layer(x, x, use_causal_mask=True)),
        dense_output(layer, x, True),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_sorted_chunks_in_the_layer(causal, monkeypatch):
    """Which a sequence so short takes only by this plan."""
    plan = dataclasses.replace(BLOCK_SIZES["cpu"], lsh_pairs=0)
    monkeypatch.setitem(BLOCK_SIZES, "cpu", plan)
    # A length of its own: JAX keeps compiled programs.
    x = inputs(length=19)
    mask = np.random.default_rng(2).random(x.shape[:2]) > 0.3
    layer = built(x)
    output = layer(x, x, use_causal_mask=causal, query_mask=mask, key_mask=mask)
    expected, _ = dense.layer_output(
        layer,
        dense.reformer_heads,
        x,
        x,
        causal=causal,
        query_mask=mask,
        key_mask=mask,
    )
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


def test_dropout_below_a_length_is_of_the_pairs_there_are(monkeypatch):
    call, shapes = keras.layers.Dropout.call, []

    def log(self, inputs, training=False):
        shapes.append(tuple(inputs.shape))
        return call(self, inputs, training)

    monkeypatch.setattr(keras.layers.Dropout, "call", log)
    x = inputs()
    layer = built(x, dense_length=4000, dropout=0.3)
    layer(x, x, training=True)
    assert shapes == [(2, 2, 1, 21, 42)]


def test_dense_below_a_length_that_a_graph_does_not_know(backend):
    if backend != "tensorflow":
        pytest.skip("only TensorFlow traces unknown lengths")
    import tensorflow as tf

    layer = built(inputs(), dense_length=15)

    @tf.function(input_signature=[tf.TensorSpec((None, None, 6))])
    def trace(x):
        return layer(x, x)

    with pytest.raises(ValueError, match="dense_length=15"):
        trace(inputs())


def test_dropout_leaves_the_expected_output():
    x = inputs(length=9, batch=1)
    layer = built(x, dropout=0.3, bucket_size=16)
    expected = to_numpy(layer(x, x))
    rows = np.repeat(x, 60, axis=0)
    samples = to_numpy(layer(rows, rows, training=True))[:, None]
    deviation = samples.std(0).max() / np.sqrt(len(samples))
    assert samples.std(0).min() > 0
    assert np.abs(samples.mean(0) - expected).max() < 5 * deviation


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bucket_size": 0}, "bucket_size=0"),
        ({"num_hashes": 0}, "num_hashes=0"),
        ({"num_hashes": 4, "max_hashes": 3}, "max_hashes=3"),
        ({"num_buckets": 3}, "num_buckets=3"),
        ({"num_buckets": (4, 3)}, r"num_buckets=\(4, 3\)"),
        ({"num_buckets": ()}, r"num_buckets=\(\)"),
        ({"num_buckets": 32.0}, r"num_buckets=32\.0"),
        ({"num_buckets": None}, "num_buckets=None"),
        ({"aligned": "yes"}, "aligned='yes'"),
        ({"across_buckets": 1}, "across_buckets=1"),
        ({"across_buckets": True, "aligned": True}, "across_buckets=True"),
        ({"scale_logits": None}, "scale_logits=None"),
        ({"num_local_heads": 2}, "num_local_heads=2"),
        ({"num_local_heads": True}, "num_local_heads=True"),
        ({"dense_length": 0}, "dense_length=0"),
    ],
    ids=str,
)
def test_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ReformerLSHAttention(**{**SMALL, **options})


def test_invalid_calls():
    x = inputs()
    layer = built(x)
    with pytest.raises(ValueError, match="num_hashes=9"):
        layer(x, x, num_hashes=9)
    with pytest.raises(ValueError, match="num_hashes=True"):
        layer(x, x, num_hashes=True)
    with pytest.raises(ValueError, match="num_hashes=2"):
        layer(
            x, x, use_causal_mask=True, num_hashes=2, state=layer.get_initial_state(2)
        )
    with pytest.raises(ValueError, match=r"key\.shape=\(2, 21, 3\)"):
        ReformerLSHAttention(**SMALL)(x, x, x[..., :3])
    for options in ({"aligned": False}, {"dense_length": 5}):
        with pytest.raises(ValueError, match="A state needs aligned=True"):
            built(x, **options).get_initial_state(2)
