"""Learned spans of AdaptiveSpan, and trimmed windows."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import AdaptiveSpan
from keras_efficient_attn.layers import TrimSpans, plot_spans, trim_spans
from keras_efficient_attn.layers.attention.adaptive_span import layer as adaptive_span
from keras_efficient_attn.layers.attention.adaptive_span.layer import UnitInterval
from keras_efficient_attn.ops.common.plan import BLOCK_SIZES
from tests import dense
from tests.autodiff import assert_slope, gradients, to_numpy
from tests.largest_tensor import largest_tensor
from tests.weight_gradients import loss_of_weights

LENGTH, DIM, MAX_SPAN, RAMP = 230, 6, 200, 8


def inputs(seed=0, length=LENGTH):
    shape = (1, length, DIM)
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def make(spans=(5.3, 40.6), **options):
    """A built layer with two heads of these spans."""
    options = {"max_span": MAX_SPAN, "ramp": RAMP, **options}
    layer = AdaptiveSpan(2, 4, **options)
    layer.build((1, LENGTH, DIM), (1, LENGTH, DIM))
    if layer.dynamic:
        random = np.random.default_rng(7)
        layer._span_kernel.assign(random.normal(size=(DIM, 2)))
    else:
        set_spans(layer, spans)
    return layer


def set_spans(layer, spans):
    layer._span.assign(np.array(spans) / layer.max_span)


def dense_output(layer, x, **kwargs):
    heads = dense.adaptive_span_heads
    return dense.layer_output(layer, heads, x, x, causal=True, **kwargs)[0]


def assert_equals_definition(layer, x):
    output = to_numpy(layer(x, x, use_causal_mask=True))
    np.testing.assert_allclose(output, dense_output(layer, x), rtol=1e-4, atol=1e-5)


def test_a_query_without_its_own_position_sees_earlier_ones():
    layer, x = make(include_self=False, initial_span=3), inputs()
    assert_equals_definition(layer, x)
    # The first query sees nothing: only the output's bias remains.
    output = to_numpy(layer(x, x, use_causal_mask=True))
    bias = np.broadcast_to(layer.get_weights()[-1], output[:, 0].shape)
    assert [w.path for w in layer.weights][-1].endswith("bias")
    np.testing.assert_allclose(output[:, 0], bias, atol=1e-6)


# Spans learn.


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_frozen_layer_has_no_penalty_and_keeps_its_spans(dynamic):
    layer, x = make(dynamic=dynamic), inputs()
    layer.trainable = False
    before = [to_numpy(w) for w in layer.weights]
    layer(x, x, use_causal_mask=True, training=True)
    assert not layer.losses
    for old, weight in zip(before, layer.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), old)
    layer.trainable = True
    layer(x, x, use_causal_mask=True, training=True)
    assert len(layer.losses) == 1


def assert_slopes(layer, names, x):
    """Compares these weights' gradients with differences of the dense formula."""
    variables = [w for w in layer.trainable_weights if w.name in names]
    assert len(variables) == len(names)
    weight = inputs(seed=3)

    def loss():
        output = layer(x, x, use_causal_mask=True)
        return ops.sum(ops.multiply(output, weight))

    def definition(*values):
        changed = {v.name: value for v, value in zip(variables, values, strict=True)}
        return (dense_output(WithWeights(layer, **changed), x) * weight).sum()

    loss, values = loss_of_weights(loss, variables)
    for i, gradient in enumerate(gradients(loss, *values)):
        assert_slope(gradient, definition, values, i, step=1e-7, tolerance=1e-3)


class WithWeights:
    """The layer for the dense formula, with some weights replaced, in float64."""

    def __init__(self, layer, **changed):
        self._layer, self._changed = layer, changed

    def __getattr__(self, name):
        return getattr(self._layer, name)

    def get_weights(self):
        pairs = zip(self._layer.weights, self._layer.get_weights(), strict=True)
        return [self._changed.get(weight.name, array) for weight, array in pairs]


def test_spans_have_the_slope_of_the_formula(monkeypatch):
    # Makes the gradient recompute the blocks of the band.
    small = dataclasses.replace(BLOCK_SIZES["cpu"], step_floats=1)
    monkeypatch.setitem(BLOCK_SIZES, "cpu", small)
    assert_slopes(make(), {"span"}, inputs())


def test_dynamic_spans_have_the_slope_of_the_formula():
    layer = make(dynamic=True, relative_positions=True, initial_span=20)
    assert_slopes(layer, {"span_kernel", "span_bias", "table"}, inputs())


def test_the_penalty_is_the_mean_span_in_training():
    layer, x = make(penalty=0.5), inputs()
    layer(x, x)
    assert layer.losses == []
    layer(x, x, training=True)
    (loss,) = layer.losses
    np.testing.assert_allclose(to_numpy(loss), 0.5 * (5.3 + 40.6) / 2, rtol=1e-6)


def test_dynamic_spans_are_averaged_over_real_positions():
    layer, x = make(dynamic=True, penalty=0.5, initial_span=20), inputs()
    mask = np.arange(LENGTH)[None] < 100
    x[:, 100:] = np.nan
    layer(x, x, query_mask=mask, key_mask=mask, training=True)
    logits = x[0, :100] @ to_numpy(layer._span_kernel) + to_numpy(layer._span_bias)
    spans = MAX_SPAN / (1 + np.exp(-logits))
    (loss,) = layer.losses
    np.testing.assert_allclose(to_numpy(loss), 0.5 * spans.mean(), rtol=1e-5)
    np.testing.assert_allclose(layer.spans(), spans.mean(0), rtol=1e-5)
    largest = np.maximum(spans.max(0), 0.99 * MAX_SPAN)
    np.testing.assert_allclose(to_numpy(layer._largest_span), largest, rtol=1e-5)


@pytest.mark.parametrize("seen", [100, 0])
def test_inputs_that_overflow_leave_no_trace_in_dynamic_spans(seen):
    layer, x = make(dynamic=True), inputs()
    layer(x, x, training=True)
    before = layer.spans()
    x[:, seen:] = np.nan
    layer(x, x, training=True)
    logits = x[0, :seen] @ to_numpy(layer._span_kernel) + to_numpy(layer._span_bias)
    spans = MAX_SPAN / (1 + np.exp(-logits))
    expected = spans.mean(0) if seen else before
    np.testing.assert_allclose(layer.spans(), expected, rtol=1e-5)
    assert layer.trim() == MAX_SPAN
    assert np.isfinite(to_numpy(layer._largest_span)).all()


def test_dynamic_spans_start_where_they_are_told_to():
    layer = AdaptiveSpan(2, 4, max_span=200, dynamic=True, initial_span=50)
    layer.build((1, 3, DIM), (1, 3, DIM))
    spans = layer._spans(ops.convert_to_tensor(inputs(length=3)), None)
    np.testing.assert_allclose(to_numpy(spans), 50, rtol=1e-5)
    np.testing.assert_allclose(layer.spans(), 50, rtol=1e-5)


def test_spans_stay_between_nothing_and_the_largest():
    layer = make()
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.apply([ops.array([5.0, -5.0])], [layer._span])
    np.testing.assert_array_equal(layer.spans(), [0, MAX_SPAN])
    assert isinstance(layer._span.constraint, UnitInterval)


# Windows follow.


def test_trimming_changes_no_output_and_spans_can_grow_again():
    layer, x = make(), inputs()
    whole = to_numpy(layer(x, x, use_causal_mask=True))
    _, state = layer(
        x[:, :120],
        x[:, :120],
        use_causal_mask=True,
        state=layer.get_initial_state(1),
    )
    # 40.6 + 8 positions, rounded up to 64, plus 64 spare keys.
    assert (layer.trim(), layer.window) == (128, 128)
    trimmed = to_numpy(layer(x, x, use_causal_mask=True))
    np.testing.assert_allclose(trimmed, whole, rtol=1e-5, atol=1e-6)
    # A state stays valid after a trim.
    rest, state = layer(x[:, 120:], x[:, 120:], use_causal_mask=True, state=state)
    np.testing.assert_allclose(to_numpy(rest), whole[:, 120:], rtol=1e-5, atol=1e-6)
    assert state["key"].shape[1] == 127

    # Spans grow into the spare keys, with the gradient of the formula, …
    set_spans(layer, (119.5, 0.3))
    assert_equals_definition(layer, x)
    assert_slopes(layer, {"span"}, x)
    # … beyond them after the next trim, up to the maximum, and back.
    assert layer.trim() == 192
    set_spans(layer, (150.0, 199.0))
    assert layer.trim() == MAX_SPAN
    assert_equals_definition(layer, x)
    set_spans(layer, (0.0, 0.0))
    assert layer.trim() == 128
    assert layer.get_config()["window"] == 128


def test_dynamic_windows_follow_what_training_saw():
    layer, x = make(dynamic=True, initial_span=4), inputs()
    layer._span_kernel.assign(np.zeros((DIM, 2)))
    assert layer.trim() == MAX_SPAN
    layer._largest_span.assign(np.zeros(2))
    layer(x, x, training=True)
    assert layer.trim() == 128


def test_positions_are_of_distances_on_both_sides():
    layer, x = make(relative_positions=True), inputs()
    heads = dense.adaptive_span_heads
    expected, _ = dense.layer_output(layer, heads, x, x)
    output = to_numpy(layer(x, x))
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_no_tensor_has_the_size_of_the_matrix():
    length = 1024
    layer = AdaptiveSpan(1, 4, max_span=32, ramp=4)
    layer.build((1, length, 4), (1, length, 4))

    def loss(x):
        return ops.sum(ops.square(layer(x, x, use_causal_mask=True)))

    x = np.ones((1, length, 4), "float32")
    assert largest_tensor(loss, x) < length**2 / 4


def make_model():
    keras.utils.set_random_seed(1)
    sequence = keras.Input((None, DIM))
    layer = AdaptiveSpan(
        2, 4, max_span=MAX_SPAN, ramp=RAMP, initial_span=30, penalty=1e-3
    )
    model = keras.Model(sequence, layer(sequence, sequence, use_causal_mask=True))
    # torch.compile takes minutes per model; torch users run eagerly.
    jit_compile = keras.backend.backend() != "torch"
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
    return model


def test_a_model_trims_and_compiles_again_while_it_trains(monkeypatch):
    windows, make = [], adaptive_span._span_config

    def record(window, *options):
        windows.append(window)
        return make(window, *options)

    monkeypatch.setattr(adaptive_span, "_span_config", record)
    x = np.concatenate([inputs(), inputs(1)])
    plain, trimmed = make_model(), make_model()
    expected = plain.fit(x, x, batch_size=1, epochs=2, verbose=0, shuffle=False)
    assert set(windows) == {MAX_SPAN}
    trimmed.evaluate(x, x, verbose=0)
    windows.clear()
    received = trimmed.fit(
        x,
        x,
        batch_size=1,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[TrimSpans(every=2)],
    )
    # A function compiled after two of the four steps has the window at that time.
    assert set(windows) == {MAX_SPAN, 128}
    np.testing.assert_allclose(
        received.history["loss"], expected.history["loss"], rtol=1e-5
    )
    for weight, other in zip(trimmed.weights, plain.weights, strict=True):
        np.testing.assert_allclose(
            to_numpy(weight), to_numpy(other), rtol=1e-4, atol=1e-6
        )
    assert int(trimmed.optimizer.iterations) == 4
    assert np.any(trimmed.layers[-1].spans() != 30)
    windows.clear()
    evaluated = trimmed.evaluate(x, x, verbose=0)
    np.testing.assert_allclose(evaluated, plain.evaluate(x, x, verbose=0), rtol=1e-5)
    assert set(windows) >= {128}
    assert trim_spans(trimmed) is False


# In models.


def test_the_plot_has_a_point_for_each_head(tmp_path):
    layers = [make(), make((0.0, 100.0))]
    sequence = keras.Input((None, DIM))
    x = sequence
    for layer in layers:
        x = layer(x, x)
    model = keras.Model(sequence, x)
    figure = plot_spans(model, tmp_path / "spans.png")
    assert (tmp_path / "spans.png").stat().st_size > 0
    first, second, means = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_allclose(first, [5.3, 40.6], rtol=1e-6)
    np.testing.assert_allclose(second, [0, 100], rtol=1e-6)
    np.testing.assert_allclose(means, [22.95, 50], rtol=1e-6)
    with pytest.raises(ValueError, match="AdaptiveSpan"):
        plot_spans(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_span": 0}, "max_span=0"),
        ({"ramp": 0}, "ramp=0"),
        ({"initial_span": 201}, "initial_span=201"),
        ({"initial_span": -1}, "initial_span=-1"),
        ({"include_self": 0}, "include_self=0"),
        ({"penalty": -1e-6}, "penalty=-1e-06"),
        ({"dynamic": 1}, "dynamic=1"),
        ({"relative_positions": "learned"}, "relative_positions='learned'"),
        ({"window": 201}, "window=201"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match=r"`trim\(\)` needs a built layer"):
        AdaptiveSpan(2, 4).trim()
    with pytest.raises(ValueError, match="every=0"):
        TrimSpans(every=0)
    with pytest.raises(ValueError, match="needs a layer that is not built"):
        make().share_weights_with(make())


def test_training_without_rows_leaves_dynamic_spans_as_they_are(backend):
    if backend == "tensorflow":
        pytest.skip("docs/limits.md")
    layer = make(dynamic=True)
    before = layer.spans()
    x = np.zeros((0, 5, DIM), "float32")
    assert tuple(layer(x, x, training=True).shape) == x.shape
    np.testing.assert_array_equal(layer.spans(), before)
