"""Point 1: the layer replaces `keras.layers.MultiHeadAttention` everywhere."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from tests.autodiff import to_numpy
from tests.contract.cases import BATCH, DIM, HEADS, KEY_DIM, LENGTH, inputs

MultiHeadAttention = keras.layers.MultiHeadAttention
pytestmark = pytest.mark.once_a_layer


def test_signatures_start_with_keras_own(case):
    theirs = list(inspect.signature(MultiHeadAttention.call).parameters)
    ours = list(inspect.signature(case.layer.call).parameters)
    assert ours[: len(theirs)] == theirs
    assert list(inspect.signature(case.layer.build).parameters) == list(
        inspect.signature(MultiHeadAttention.build).parameters
    )
    positional = case.layer(HEADS, KEY_DIM, 5, 0.1, False, 7)
    assert isinstance(positional, MultiHeadAttention)
    config = positional.get_config()
    received = [config[n] for n in ("value_dim", "dropout", "use_bias", "output_shape")]
    assert received == [5, 0.1, False, (7,)]


def test_the_signature_names_every_argument(case):
    parameters = inspect.signature(case.layer).parameters
    theirs = list(inspect.signature(MultiHeadAttention).parameters)
    assert list(parameters)[: len(theirs) - 1] + ["kwargs"] == theirs
    others = list(parameters.values())[len(theirs) - 1 : -1]
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}
    # A layer saves its arguments, those of `keras.layers.Layer`, and its shapes.
    saved = set(case.layer(num_heads=2, key_dim=4).get_config())
    saved -= {"query_shape", "key_shape", "value_shape", *keras.Layer().get_config()}
    assert saved <= set(parameters)


def test_num_heads_and_key_dim_are_enough(case):
    layer, x = case.layer(num_heads=2, key_dim=4), inputs()
    assert tuple(layer(x, x, **case.plain).shape) == x.shape


class WithoutBuild(keras.Model):
    """A model whose layer is built by its first call."""

    def __init__(self, case):
        super().__init__()
        self.layer = case.make()
        self.options = case.plain

    def call(self, x):
        return self.layer(x, x, **self.options)


def test_a_model_that_is_not_built_builds_the_layer(case):
    model, x = WithoutBuild(case), inputs()
    model.compile(loss="mse", jit_compile=False)
    assert np.isfinite(model.evaluate(x, x, verbose=0))
    expected, _ = case.oracle(model.layer, x, x)
    np.testing.assert_allclose(to_numpy(model(x)), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_multi_head_attention_load(case):
    theirs, ours = MultiHeadAttention(HEADS, KEY_DIM), case.make()
    for layer in (theirs, ours):
        layer.build((BATCH, LENGTH, DIM), (BATCH, LENGTH, DIM))
    shared = {w.path.split("/", 1)[1]: to_numpy(w) for w in theirs.weights}
    if case.shared_key:
        shared = {p: w for p, w in shared.items() if not p.startswith("key/")}
    before = {w.path.split("/", 1)[1]: to_numpy(w) for w in ours.weights}
    assert set(shared) <= set(before)
    ours.set_weights(theirs.get_weights())
    for weight in ours.weights:
        path = weight.path.split("/", 1)[1]
        expected = shared.get(path, before[path])
        np.testing.assert_array_equal(to_numpy(weight), expected)
    with pytest.raises(ValueError, match="weight list of length 3"):
        ours.set_weights(theirs.get_weights()[:3])


def test_shapes_and_specs(setting):
    case, causal = setting
    layer = case.make(output_shape=6)
    key_length = 11 if case.cross else LENGTH
    query = value = keras.KerasTensor((None, LENGTH, DIM))
    if case.cross:
        value = keras.KerasTensor((None, key_length, DIM))
    output, scores = layer(
        query, value, use_causal_mask=causal, return_attention_scores=True
    )
    assert output.shape == (None, LENGTH, 6)
    assert scores.shape == (None, HEADS, LENGTH, key_length)
    assert layer.compute_output_shape(query.shape, value.shape) == output.shape
    query = value = inputs()
    if case.cross:
        value = inputs(length=key_length)
    output, scores = layer(
        query, value, use_causal_mask=causal, return_attention_scores=True
    )
    assert tuple(output.shape) == (BATCH, LENGTH, 6)
    assert tuple(scores.shape) == (BATCH, HEADS, LENGTH, key_length)


def test_rank_two_is_refused_with_the_argument_named(case):
    x = inputs()[:, :, 0]
    with pytest.raises(ValueError, match="`query` must have the shape"):
        case.make()(x, x, **case.plain)


def test_fit_compiled_with_unknown_batch_and_length(case, backend):
    layer = case.make(dropout=0.1)
    sequence = keras.Input((None, DIM))
    masked = keras.layers.Masking()(sequence)
    attended = layer(masked, masked, use_causal_mask=case.usual)
    model = keras.Model(sequence, keras.layers.Dense(DIM)(attended))
    # torch.compile takes minutes per model; torch users run eagerly.
    model.compile("adam", "mse", jit_compile=backend != "torch")
    x = inputs()
    before = [to_numpy(w) for w in layer.trainable_weights]
    # Enough steps to exceed the noise of the dropout.
    first = model.fit(x, 0.5 * x, epochs=20, verbose=0).history["loss"]
    assert np.all(np.isfinite(first)) and first[-1] < first[0]
    model.train_on_batch(x[:1, :11], x[:1, :11])
    for weight, old in zip(layer.trainable_weights, before, strict=True):
        # A key bias does not change softmax; every kernel has to change.
        if "kernel" in weight.path:
            assert np.any(to_numpy(weight) != old), weight.path


def test_dropout_is_seeded_and_off_at_inference(case):
    x, layer = inputs(), case.built()

    def with_dropout():
        other = case.make(dropout=0.5, seed=3)
        other.build(x.shape, x.shape)
        other.set_weights(layer.get_weights())
        return other

    first, again = (
        to_numpy(with_dropout()(x, x, training=True, **case.plain)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    quiet, expected = (
        to_numpy(each(x, x, **case.plain)) for each in (with_dropout(), layer)
    )
    np.testing.assert_array_equal(quiet, expected)
    assert np.abs(first - quiet).max() > 1e-3


def test_lora_and_quantisation_of_the_projections(case):
    layer, x = case.built(), inputs()
    expected = to_numpy(layer(x, x, **case.plain))
    layer.query_dense.enable_lora(2)
    assert layer.query_dense.lora_enabled
    np.testing.assert_allclose(
        to_numpy(layer(x, x, **case.plain)), expected, rtol=1e-5, atol=1e-6
    )
    # LoRA starts at zero: once changed, it must change the output.
    update = layer.query_dense.lora_kernel_b
    update.assign(np.full(update.shape, 0.5))
    expected, unchanged = to_numpy(layer(x, x, **case.plain)), expected
    assert np.abs(expected - unchanged).max() > 1e-4
    layer.value_dense.quantize("int8")
    quantised = to_numpy(layer(x, x, **case.plain))
    assert np.abs(quantised - expected).max() < 0.1 * np.abs(expected).max()


def test_quantised_projections_of_an_empty_sequence(case):
    layer, x = case.built(), inputs(length=0)
    for projection in (layer.query_dense, layer.value_dense, layer.output_dense):
        projection.quantize("int8")
    output, scores = layer(x, x, return_attention_scores=True, **case.plain)
    assert tuple(output.shape) == x.shape
    assert tuple(scores.shape) == (BATCH, HEADS, 0, 0)


def test_activity_regularizer_and_loss(case):
    layer, x = case.make(activity_regularizer=keras.regularizers.L2(0.1)), inputs()
    output = to_numpy(layer(x, x, **case.plain))
    own = 0.1 * (output**2).sum() / BATCH
    # Keras also passes the regularizer to the projections, as in its own layer.
    theirs = keras.layers.MultiHeadAttention(
        HEADS, KEY_DIM, activity_regularizer=keras.regularizers.L2(0.1)
    )
    theirs(x, x)
    losses = [float(ops.convert_to_numpy(loss)) for loss in layer.losses]
    assert len(losses) == len(theirs.losses) - case.shared_key
    assert min(abs(loss - own) for loss in losses) < 1e-4 * own


def test_scores_with_unknown_length_in_a_graph(case, backend):
    if backend != "tensorflow":
        pytest.skip("only TensorFlow traces unknown lengths")
    import tensorflow as tf

    causal = case.usual
    layer, x = case.built(), inputs()

    @tf.function(input_signature=[tf.TensorSpec((None, None, DIM))], autograph=False)
    def trace(x):
        return layer(x, x, use_causal_mask=causal, return_attention_scores=True)

    for length in (LENGTH, 0):
        output, scores = trace(x[:, :length])
        assert scores.shape == (BATCH, HEADS, length, length)
        assert output.shape == (BATCH, length, DIM)
    _, expected = case.oracle(layer, x, x, causal=causal)
    np.testing.assert_allclose(trace(x)[1], expected, rtol=1e-4, atol=1e-5)
