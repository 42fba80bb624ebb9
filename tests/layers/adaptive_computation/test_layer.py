"""Adaptive computation time against its definition in NumPy, float64."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import AdaptiveComputationTime
from keras_efficient_attn.ops import adaptive_computation
from tests.autodiff import assert_slope, gradient_function, to_numpy
from tests.dense import sigmoid
from tests.layers.adaptive_computation.adaptive import definition
from tests.saving import assert_same_model, saved_and_loaded

BATCH, LENGTH, DIM, STEPS = 2, 5, 4, 6
MASK = np.array([[1, 1, 1, 0, 1], [1, 1, 0, 0, 0]], bool)


def inputs():
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM))
    return x.astype("float32")


@keras.saving.register_keras_serializable(package="tests")
class Drift(keras.layers.Layer):
    """A step with a neighbour: `0.5 s + tanh(s[t − 1] K)`; counts its calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        self.calls += 1
        return 0.5 * x + ops.tanh(ops.matmul(ops.roll(x, 1, axis=1), self.kernel))

    def compute_output_shape(self, shape):
        return shape


def make_layer(bias=-0.5, spread=2.0, **options):
    """Halting probabilities differ between positions."""
    layer = AdaptiveComputationTime(Drift(), STEPS, **options)
    layer.build((BATCH, LENGTH, DIM))
    random = np.random.default_rng(1)
    layer.step.kernel.assign(random.normal(size=(DIM, DIM)))
    layer.halting.unit.kernel.assign(spread * random.normal(size=(DIM, 1)))
    layer.halting.unit.bias.assign([bias])
    return layer


def dense(layer, x, mask=None, epsilon=0.01):
    """The layer's definition, position by position."""
    kernel = to_numpy(layer.step.kernel).astype("float64")
    weights = to_numpy(layer.halting.unit.kernel).astype("float64")[:, 0]
    bias = float(to_numpy(layer.halting.unit.bias)[0])
    x = x.astype("float64")
    if mask is not None:
        x = np.where(mask[..., None], x, 0.0)
    return definition(
        lambda n, s: 0.5 * s + np.tanh(np.roll(s, 1, axis=1) @ kernel),
        lambda s: sigmoid(s @ weights + bias),
        x,
        np.ones(x.shape[:2], bool) if mask is None else mask,
        STEPS,
        epsilon,
    )


def assert_ponder_equal(received, expected):
    for name in ("steps", "remainders", "probabilities"):
        value = expected[name]
        np.testing.assert_allclose(
            to_numpy(received[name]), value, rtol=1e-4, atol=1e-5, err_msg=name
        )


# The weights.


def test_weights_sum_to_exactly_one():
    # Sequences near 0, near 1, in between, and prone to rounding errors.
    random = np.random.default_rng(0)
    scale = 10.0 ** random.uniform(-9, 0, (4000, 1))
    h = (random.uniform(size=(4000, 12)) * scale).astype("float32")
    h[:5] = [[1.0], [0.0], [0.99], [0.3], [1 / 3]]
    sequence = ops.convert_to_tensor(h)
    _, ponder = adaptive_computation(
        lambda n, s: (s, sequence[:, n]),
        ops.zeros((4000, 1)),
        ops.ones((4000,), "bool"),
        max_steps=12,
    )
    total = np.zeros(4000, "float32")
    for weight in to_numpy(ponder["probabilities"]).T:
        total = total + weight
    assert (total == 1).all()
    steps = to_numpy(ponder["steps"])
    assert set(steps) >= {1.0, 2.0, 3.0, 12.0}
    # T2T's interpolation gave 0.69 for this sequence.
    np.testing.assert_allclose(
        to_numpy(ponder["probabilities"])[3, :4], [0.3, 0.3, 0.3, 0.1], atol=1e-6
    )


def test_outputs_and_statistics_are_those_of_the_definition():
    layer, x = make_layer(), inputs()
    expected, statistics = dense(layer, x)
    assert len(np.unique(statistics["steps"])) >= 3
    for training in (True, False):
        output, ponder = layer(x, training=training, return_ponder=True)
        np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
        assert_ponder_equal(ponder, statistics)
        cost = 0.01 * (statistics["steps"] + statistics["remainders"]).mean()
        np.testing.assert_allclose(to_numpy(layer.losses[0]), cost, rtol=1e-5)


def test_the_cost_of_the_paper_is_a_sum_over_the_sequence():
    layer, x = make_layer(ponder_reduction="sum"), inputs()
    mask = np.arange(LENGTH) < np.array([LENGTH, 2])[: len(x), None]
    _, statistics = dense(layer, x, mask)
    ponder = statistics["steps"] + statistics["remainders"]
    layer(x, mask=mask)
    expected = 0.01 * ponder.sum(1).mean()
    np.testing.assert_allclose(to_numpy(layer.losses[0]), expected, rtol=1e-5)


def test_gradient_of_the_ponder_cost():
    """−ponder_cost / positions for each hₙ with n < N, and 0 for the last."""
    layer, x = make_layer(), inputs()
    _, statistics = dense(layer, x)
    steps = statistics["steps"]

    def cost(logits):
        # The logits of the halting unit, for all steps: its states are its logits.
        _, ponder = adaptive_computation(
            lambda n, s: (s, ops.sigmoid(logits[..., n])),
            logits[..., :1],
            ops.ones((BATCH, LENGTH), "bool"),
            STEPS,
        )
        return layer.halting.cost(ponder, ops.ones((BATCH, LENGTH), "bool"))

    h = np.clip(statistics["halting"], 1e-6, 1 - 1e-6)
    (received,) = gradient_function(cost)(np.log(h / (1 - h)).astype("float32"))
    before = np.arange(STEPS) < steps[..., None] - 1
    expected = np.where(before, -0.01 / steps.size * h * (1 - h), 0.0)
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-8)


def test_gradient_of_the_output_is_that_of_differences():
    """Checked by central differences of the definition, which do not change N."""
    layer, x = make_layer(), inputs()
    direction = np.random.default_rng(2).normal(size=x.shape)

    def loss(x):
        return ops.sum(ops.cast(direction, "float32") * layer(x, training=True))

    (received,) = gradient_function(loss)(x)

    def value(x):
        return (direction * dense(layer, x)[0]).sum()

    assert_slope(received, value, [x])


# Early exit.


@pytest.mark.parametrize("bias", [4.7, -3.0])
def test_early_exit_stops_and_changes_nothing(bias):
    # At 4.7 all positions halt after a few steps; at −3 none halts before the last.
    layer, x = make_layer(bias, spread=0.5), inputs()
    expected, unrolled = layer(x, training=True, return_ponder=True)
    assert layer.step.calls == STEPS
    layer.step.calls = 0
    output, ponder = layer(x, return_ponder=True)
    assert layer.step.calls == to_numpy(unrolled["steps"]).max()
    assert (layer.step.calls < STEPS) == (bias == 4.7)
    np.testing.assert_allclose(
        to_numpy(output), to_numpy(expected), rtol=1e-6, atol=1e-7
    )
    assert_ponder_equal(ponder, {k: to_numpy(v) for k, v in unrolled.items()})


def test_a_compiled_loop_stops_too(backend):
    """Steps are counted inside the compiled program."""
    calls = []

    def run(h):
        def step(n, state):
            report(lambda: calls.append(1))
            return state + 1, h

        running = ops.ones_like(h, dtype="bool")
        return adaptive_computation(
            step, ops.zeros_like(h), running, 50, early_exit=True
        )

    report = {"jax": _report_jax, "tensorflow": _report_tensorflow}.get(
        backend, lambda call: call()
    )
    h = ops.convert_to_tensor(np.array([0.5, 0.1, 1.0], "float32"))
    output, ponder = _compile(run)(h)
    np.testing.assert_array_equal(to_numpy(ponder["steps"]), [2, 10, 1])
    np.testing.assert_allclose(to_numpy(output), [1.5, 5.5, 1.0], rtol=1e-5)
    assert len(calls) == 10


def _compile(function):
    if keras.backend.backend() == "jax":
        import jax

        def run(x):
            output = jax.jit(function)(x)
            jax.effects_barrier()
            return output

        return run
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


def _report_jax(call):
    import jax

    jax.debug.callback(call)


def _report_tensorflow(call):
    import tensorflow as tf

    tf.py_function(call, [], [])


# Halting and masks.


def test_a_step_without_a_build_of_its_own_is_built():
    class Composed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(4)

        def call(self, x):
            return self.inner(x)

        def compute_output_shape(self, shape):
            return shape

    layer = AdaptiveComputationTime(Composed(), max_steps=2)
    layer.build((2, 3, 4))
    assert len(layer.step.trainable_variables) == 2


def test_a_halted_position_never_changes():
    seen = []

    def step(n, state):
        seen.append(to_numpy(state).copy())
        return state + 1.0, h[:, n]

    h = ops.convert_to_tensor([[1.0] * 4, [0.4] * 4, [0.0] * 4])
    state = ops.convert_to_tensor([[10.0], [20.0], [30.0]])
    running = ops.convert_to_tensor([True, True, True])
    adaptive_computation(step, state, running, 4)
    adaptive_computation(step, state, ops.logical_not(running), 4)
    expected = [[10, 20, 30], [11, 21, 31], [11, 22, 32], [11, 23, 33]]
    np.testing.assert_array_equal(np.stack(seen[:4])[..., 0], expected)
    np.testing.assert_array_equal(np.stack(seen[4:])[..., 0], [[10, 20, 30]] * 4)


def test_padding_is_never_read_and_costs_nothing():
    layer, x = make_layer(), inputs()
    expected, statistics = dense(layer, x, MASK)
    x[~MASK] = np.nan
    output, ponder = layer(x, mask=MASK, training=True, return_ponder=True)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)
    assert (to_numpy(output)[~MASK] == 0).all()
    assert_ponder_equal(ponder, statistics)
    cost = (statistics["steps"] + statistics["remainders"]).sum() / MASK.sum()
    np.testing.assert_allclose(to_numpy(layer.losses[0]), 0.01 * cost, rtol=1e-5)

    def loss(x):
        return ops.sum(layer(x, mask=MASK, training=True)) + layer.losses[0]

    (gradient,) = gradient_function(loss)(x)
    assert np.isfinite(gradient).all() and (gradient[~MASK] == 0).all()
    assert (gradient[MASK] != 0).any()


def test_padding_does_not_lengthen_the_loop():
    # Padding would run to the end; real positions halt at once.
    layer = make_layer(0.0, spread=0.0)
    layer.halting.unit.kernel.assign([[20.0], [0.0], [0.0], [0.0]])
    layer.step.kernel.assign(np.zeros((DIM, DIM)))
    x = np.where(MASK[..., None], 1.0, -1.0) * np.ones((1, 1, DIM))
    layer.step.calls = 0
    _, ponder = layer(x.astype("float32"), return_ponder=True)
    assert layer.step.calls == STEPS
    layer.step.calls = 0
    _, ponder = layer(x.astype("float32"), mask=MASK, return_ponder=True)
    assert layer.step.calls == 1
    np.testing.assert_array_equal(to_numpy(ponder["steps"]), MASK)


def test_keras_masks_arrive():
    layer = make_layer()
    tokens = np.where(MASK, 3, 0)
    embedding = keras.layers.Embedding(5, DIM, mask_zero=True)
    _, ponder = layer(embedding(tokens), return_ponder=True)
    np.testing.assert_array_equal(to_numpy(ponder["steps"]) > 0, MASK)


@pytest.mark.parametrize("mode", [None, "full"])
def test_the_step_is_told_that_it_trains(mode, backend):
    """A trainer of JAX calls `call` alone; rematerialised steps run outside of it."""
    if mode and backend == "jax":
        pytest.skip("Keras makes `training` a tracer, for its own dropout as well")
    step = keras.Sequential([keras.layers.Dense(DIM), keras.layers.Dropout(0.9)])
    with keras.RematScope(mode=mode):
        layer = AdaptiveComputationTime(step, STEPS)
    layer.build(inputs().shape)
    values = [[v.value for v in layer.trainable_variables]]
    values += [[v.value for v in layer.non_trainable_variables]]
    plain, trained = (
        to_numpy(layer.stateless_call(*values, inputs(), training=training)[0])
        for training in (False, True)
    )
    assert np.mean(trained == 0) > 0.5 > np.mean(plain == 0)


# Keras.


def test_fit_with_unknown_length_saving_and_half_precision(backend, tmp_path):
    sequence = keras.Input((None, DIM))
    step = keras.Sequential(
        [keras.layers.Dense(DIM, "tanh"), keras.layers.Dropout(0.1)]
    )
    layer = AdaptiveComputationTime(
        step, 3, ponder_cost=0.5, halting_bias=-3.0, dtype="mixed_bfloat16"
    )
    model = keras.Model(sequence, layer(sequence))
    model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=backend != "torch")
    x = inputs()
    before = to_numpy(layer(x, return_ponder=True)[1]["steps"]).mean()
    model.fit(x, np.zeros_like(x), epochs=40, verbose=0)
    output, ponder = layer(x, return_ponder=True)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    assert keras.backend.standardize_dtype(ponder["remainders"].dtype) == "float32"
    # Training lowers the cost from a deep start.
    assert before == 3 and to_numpy(ponder["steps"]).mean() < 3
    np.testing.assert_allclose(
        to_numpy(ponder["probabilities"]).sum(-1), 1.0, rtol=1e-6
    )
    restored = saved_and_loaded(model, tmp_path)
    assert_same_model(restored, model, x, rtol=0, atol=0)
    assert (
        restored.layers[-1].halting.kept_arguments() == layer.halting.kept_arguments()
    )


def test_errors_name_what_was_received():
    step = keras.layers.Dense(DIM)
    for options, message in (
        (dict(max_steps=0), "max_steps=0"),
        (dict(max_steps=2, epsilon=1.0), "epsilon=1.0"),
        (dict(max_steps=2, ponder_cost=-1), "ponder_cost=-1"),
        (dict(max_steps=2, halting_bias="1"), "`halting_bias` must be a number.*'1'"),
        (dict(max_steps=2, early_exit=1), "`early_exit` must be a boolean.*=1"),
        (dict(max_steps=2, input_flag=True), "input_flag=True"),
    ):
        with pytest.raises(ValueError, match=message):
            AdaptiveComputationTime(step, **options)
    with pytest.raises(TypeError, match="step=3"):
        AdaptiveComputationTime(3, 2)
    with pytest.raises(ValueError, match="the shape of its input"):
        AdaptiveComputationTime(keras.layers.Dense(DIM + 1), 2)(inputs())
    with pytest.raises(ValueError, match="states"):
        AdaptiveComputationTime(step, 2)(inputs(), [inputs()])
