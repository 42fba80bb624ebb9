import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import ChunkedFeedForward, ChunkedVocabularyLoss
from keras_efficient_attn.ops import chunked_cross_entropy
from tests.autodiff import gradient_function, gradients, to_numpy
from tests.largest_tensor import temporary_bytes
from tests.saving import assert_same_model, saved_and_loaded
from tests.weight_gradients import weight_gradient_function

BATCH, LENGTH, DIM, CLASSES = 2, 11, 4, 23


def inputs():
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, LENGTH, DIM)).astype("float32")


def network(dropout=0.0):
    return keras.Sequential(
        [
            keras.layers.Dense(7, "gelu"),
            keras.layers.Dropout(dropout, seed=1),
            keras.layers.Dense(3),
        ]
    )


def value_and_gradients(layer, function, x):
    def loss(x):
        return ops.sum(ops.square(function(x)))

    return weight_gradient_function(loss, layer, with_value=True)(x)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_slices_have_the_outputs_and_gradients_of_the_whole(chunk_size):
    layer, x = ChunkedFeedForward(network(), chunk_size), inputs()
    assert tuple(layer(x).shape) == (BATCH, LENGTH, 3)
    expected = value_and_gradients(layer, layer.feed_forward, x)
    received = value_and_gradients(layer, lambda x: layer(x, training=True), x)
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_network_with_integer_variables_has_gradients():
    # Dropout's seed is an integer, and a variable.
    layer, x = ChunkedFeedForward(network(dropout=0.5), 4), inputs()
    layer(x)
    sliced = value_and_gradients(layer, layer, x)
    whole = value_and_gradients(layer, layer.feed_forward, x)
    for ours, theirs in zip(sliced, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_hidden_states_and_kernel_may_have_different_dtypes():
    x = inputs()
    kernel = np.random.default_rng(1).normal(size=(DIM, CLASSES)).astype("float32")
    labels = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % CLASSES
    halves = ops.cast(x, "bfloat16")
    logits = to_numpy(ops.cast(halves, "float32")).astype("float64") @ kernel
    expected = np.log(np.exp(logits).sum(-1))
    expected -= np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    received = chunked_cross_entropy(halves, kernel, None, labels, chunk_size=4)
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-5)


UNITS = 40


def make_dropping(seed):
    """`y[t] = Σ_u x[t] kernel[u] kept[t, u] / (1 - rate)`, of units of one sign."""
    network = keras.Sequential(
        [
            keras.layers.Dense(UNITS, use_bias=False),
            keras.layers.Dropout(0.25, seed=seed),
            keras.layers.Dense(UNITS, use_bias=False),
        ]
    )
    network.build((None, LENGTH, 1))
    network.layers[0].kernel.assign(np.ones((1, UNITS)))
    network.layers[2].kernel.assign(np.eye(UNITS))
    return ChunkedFeedForward(network, 4)


@pytest.mark.parametrize("seed", [None, 1])
def test_slices_draw_for_themselves_and_again_the_same_for_the_gradient(seed):
    layer = make_dropping(seed)
    x = np.ones((BATCH, LENGTH, 1), "float32")
    layer(x)
    trained = layer.trainable_variables
    states = [(v, to_numpy(v)) for v in layer.non_trainable_variables]

    def loss(x, *weights):
        pairs = [(v, ops.convert_to_tensor(state, v.dtype)) for v, state in states]
        with keras.StatelessScope([*zip(trained, weights, strict=True), *pairs]):
            return ops.sum(layer(x, training=True))

    weights = [to_numpy(v) for v in trained]
    value, grad_x, _, grad_last = gradient_function(loss, with_value=True)(x, *weights)
    # The sum is linear in x, and its gradient the kept units of each position: they are
    # those of the value only if both passes draw the same.
    np.testing.assert_allclose(grad_x.sum(), value, rtol=1e-5)
    np.testing.assert_allclose(grad_last[:, 0].sum(), value, rtol=1e-5)
    kept = [to_numpy(layer(x, training=True))[..., :] > 0 for _ in range(2)]
    count = kept[0].size
    for one in kept:
        assert abs(one.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / count)
    # Calls, rows and slices differ.
    assert (kept[0] != kept[1]).any()
    slices = kept[0][:, :8].reshape(BATCH, 2, 4, UNITS)
    assert (slices[:, 0] != slices[:, 1]).any((1, 2)).all()
    assert (kept[0][0] != kept[0][1]).any()


def test_a_seed_gives_the_same_masks_in_every_network():
    x = np.ones((BATCH, LENGTH, 1), "float32")

    def two_calls(seed):
        layer = make_dropping(seed)
        return [to_numpy(layer(x, training=True)) for _ in range(2)]

    one, other, third = two_calls(1), two_calls(1), two_calls(2)
    np.testing.assert_array_equal(one, other)
    assert (one[0] != third[0]).any() and (one[0] != one[1]).any()
    unseeded = two_calls(None), two_calls(None)
    assert (unseeded[0][0] != unseeded[1][0]).any()


def test_an_export_for_any_length_keeps_to_the_slices(backend):
    if backend != "jax":
        pytest.skip("JAX exports symbolic lengths")
    import jax

    wide = keras.Sequential([keras.layers.Dense(4096), keras.layers.Dense(3)])
    layer = ChunkedFeedForward(wide, 4)
    x = np.random.default_rng(0).normal(size=(1, 403, DIM)).astype("float32")
    expected = to_numpy(wide(x))
    layer(x)
    (length,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((1, length, DIM), "float32")
    program = jax.export.export(jax.jit(lambda x: layer(x)))(shape)
    np.testing.assert_allclose(program.call(x), expected, rtol=1e-4, atol=1e-4)
    assert temporary_bytes(program.call, x) < 403 * 4096


def test_no_positions_give_no_positions():
    layer = ChunkedFeedForward(network(), 4)
    assert tuple(layer(inputs()[:, :0]).shape) == (BATCH, 0, 3)
    loss = ChunkedVocabularyLoss(CLASSES, chunk_size=4)
    labels = np.zeros((BATCH, 0), "int32")
    assert tuple(loss(inputs()[:, :0], labels).shape) == (BATCH, 0)


def test_a_network_without_a_build_of_its_own_has_gradients():
    class Composed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def call(self, x):
            return self.inner(x)

    layer, x = ChunkedFeedForward(Composed(), 4), inputs()
    layer.build(x.shape)
    assert len(layer.trainable_variables) == 4
    expected = value_and_gradients(layer, layer.feed_forward, x)
    received = value_and_gradients(layer, lambda x: layer(x, training=True), x)
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_fit_with_unknown_length_and_saving(backend, tmp_path):
    sequence = keras.Input((None, DIM))
    model = keras.Model(sequence, ChunkedFeedForward(network(), 4)(sequence))
    model.compile("adam", "mse", jit_compile=backend != "torch")
    losses = model.fit(inputs(), inputs()[..., :3], epochs=3, verbose=0)
    assert losses.history["loss"][-1] < losses.history["loss"][0]
    assert_same_model(saved_and_loaded(model, tmp_path), model, inputs())


@pytest.mark.parametrize("use_bias", [False, True])
def test_the_loss_is_the_cross_entropy_of_all_logits(use_bias):
    labels = np.random.default_rng(1).integers(0, CLASSES, (BATCH, LENGTH))
    labels, x = labels.astype("int32"), inputs()
    layer = ChunkedVocabularyLoss(CLASSES, use_bias=use_bias, chunk_size=4)
    assert tuple(layer(x, labels).shape) == (BATCH, LENGTH)
    if use_bias:
        layer.bias.assign(np.random.default_rng(2).normal(size=CLASSES))

    def whole(x):
        return keras.losses.sparse_categorical_crossentropy(
            labels, layer.logits(x), from_logits=True
        )

    expected = value_and_gradients(layer, whole, x)
    received = value_and_gradients(layer, lambda x: layer(x, labels), x)
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_large_logits_have_finite_losses():
    layer = ChunkedVocabularyLoss(CLASSES, dtype="mixed_bfloat16")
    labels = np.zeros((BATCH, LENGTH), "int32")
    losses = layer(1000 * inputs(), labels)
    assert keras.backend.standardize_dtype(losses.dtype) == "float32"
    assert np.isfinite(to_numpy(losses)).all() and to_numpy(losses).min() >= 0


@pytest.mark.parametrize("use_bias", [False, True])
def test_logits_in_mixed_precision_are_float32(use_bias):
    options = dict(use_bias=use_bias, dtype="mixed_bfloat16")
    layer, x = ChunkedVocabularyLoss(CLASSES, **options), inputs()
    layer.build(x.shape)
    random = np.random.default_rng(1)
    kernel, *bias = (random.normal(size=weight.shape) for weight in layer.weights)
    layer.set_weights([kernel, *bias])
    logits = layer.logits(x)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    expected = x @ kernel + (bias[0] if use_bias else 0.0)
    np.testing.assert_allclose(to_numpy(logits), expected, rtol=0.02, atol=0.05)


def test_what_cannot_be_sliced_is_refused():
    counting = keras.Sequential([keras.layers.BatchNormalization()])
    with pytest.raises(ValueError, match="must not update variables"):
        ChunkedFeedForward(counting)(inputs(), training=True)
    with pytest.raises(ValueError, match="chunk_size=0"):
        ChunkedFeedForward(network(), 0)
    with pytest.raises(TypeError, match="feed_forward=3"):
        ChunkedFeedForward(3)
    with pytest.raises(ValueError, match="vocabulary_size=0"):
        ChunkedVocabularyLoss(0)


def test_labels_that_are_no_class():
    random = np.random.default_rng(0)
    hidden = random.normal(size=(2, 5, 6)).astype("float32")
    labels = random.integers(0, CLASSES, (2, 5)).astype("int32")
    layer = ChunkedVocabularyLoss(CLASSES, chunk_size=2, ignore_class=-100)
    expected = to_numpy(layer(hidden, labels))
    ignored = labels.copy()
    ignored[0, 1:3] = -100
    received = to_numpy(layer(hidden, ignored))
    known = ignored >= 0
    np.testing.assert_allclose(received[known], expected[known], rtol=1e-6)
    np.testing.assert_array_equal(received[~known], 0.0)
    (gradient,) = gradients(lambda x: ops.sum(layer(x, ignored)), hidden)
    assert np.isfinite(gradient).all() and not gradient[~known].any()
    assert gradient[known].any()
    for label in (-1, CLASSES, -100):
        wrong = labels.copy()
        wrong[1, 4] = label
        options = {} if label == -100 else {"ignore_class": -100}
        layer = ChunkedVocabularyLoss(CLASSES, chunk_size=2, **options)
        with pytest.raises(ValueError, match=rf"`labels` must be.*\[\s*{label}\]"):
            layer(hidden, wrong)
        # A compiled program cannot raise.
        hidden_, kernel = map(ops.convert_to_tensor, (hidden, layer.kernel))
        losses = chunked_cross_entropy(hidden_, kernel, None, wrong, chunk_size=2)
        losses = to_numpy(losses)
        assert np.isnan(losses[1, 4]) and np.isfinite(losses[0]).all()
