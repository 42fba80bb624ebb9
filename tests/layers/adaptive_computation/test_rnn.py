"""Adaptive computation time in RNNs, against the cells' equations in NumPy, float64."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import AdaptiveComputationTime, AdaptiveRNN
from tests.autodiff import gradient_function, to_numpy
from tests.dense import sigmoid
from tests.layers.adaptive_computation.adaptive import definition
from tests.saving import assert_same_model, saved_and_loaded

BATCH, LENGTH, DIM, UNITS, STEPS = 2, 5, 3, 4, 5
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)
CELLS = {
    "simple": keras.layers.SimpleRNNCell,
    "lstm": keras.layers.LSTMCell,
    "gru": keras.layers.GRUCell,
}


def inputs():
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM))
    return x.astype("float32")


def make_rnn(kind="simple", cell=None, cost=0.01, flag=True, **options):
    cell = CELLS[kind](UNITS) if cell is None else cell
    adaptive = AdaptiveComputationTime(cell, STEPS, ponder_cost=cost, input_flag=flag)
    layer = AdaptiveRNN(adaptive, return_sequences=True, **options)
    layer.build((None, LENGTH, DIM))
    random = np.random.default_rng(1)
    for weight in layer.trainable_weights:
        weight.assign(random.normal(size=weight.shape))
    adaptive.halting.unit.kernel.assign(2 * random.normal(size=(UNITS, 1)))
    adaptive.halting.unit.bias.assign([-0.5])
    return layer


def cell_step(kind, cell, x, state):
    """Concatenated output and states, `(batch, units)` each, before and after."""
    kernel, recurrent, bias = (to_numpy(w).astype("float64") for w in cell.weights)
    h, *rest = np.split(state[:, UNITS:], 2 if kind == "lstm" else 1, axis=1)
    if kind == "simple":
        new = [np.tanh(x @ kernel + h @ recurrent + bias)]
    elif kind == "lstm":
        i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4, axis=1)
        c = sigmoid(f) * rest[0] + sigmoid(i) * np.tanh(g)
        new = [sigmoid(o) * np.tanh(c), c]
    else:
        z, r, g = np.split(x @ kernel + bias[0], 3, axis=1)
        hz, hr, hg = np.split(h @ recurrent + bias[1], 3, axis=1)
        z, r = sigmoid(z + hz), sigmoid(r + hr)
        new = [z * h + (1 - z) * np.tanh(g + r * hg)]
    return np.concatenate([new[0], *new], axis=1)


def dense(layer, kind, x, mask=None):
    """Outputs, statistics of all positions, and the last states."""
    adaptive = layer.cell
    weights = to_numpy(adaptive.halting.unit.kernel).astype("float64")[:, 0]
    bias = float(to_numpy(adaptive.halting.unit.bias)[0])
    width = UNITS * (3 if kind == "lstm" else 2)
    state = np.zeros((len(x), width))
    outputs, statistics = [], []
    for t in range(x.shape[1]):
        running = np.ones(len(x), bool) if mask is None else mask[:, t]
        x_t = np.where(running[:, None], x[:, t].astype("float64"), 0.0)

        def step(n, state, x_t=x_t):
            if adaptive.input_flag:
                flag = np.full((len(x_t), 1), float(n == 0))
                x_t = np.concatenate([x_t, flag], axis=1)
            return cell_step(kind, adaptive.step, x_t, state)

        new, each = definition(
            step,
            lambda s: sigmoid(s[:, :UNITS] @ weights + bias),
            state,
            running,
            STEPS,
            0.01,
        )
        state = np.where(running[:, None], new, state)
        outputs.append(state[:, :UNITS])
        statistics.append(each)
    joined = {
        name: np.stack([each[name] for each in statistics], axis=1)
        for name in ("steps", "remainders", "probabilities")
    }
    return np.stack(outputs, axis=1), joined, state[:, UNITS:]


def assert_ponder_equal(received, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(
            to_numpy(received[name]), value, rtol=1e-3, atol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("kind", CELLS)
def test_outputs_are_those_of_the_definition(kind):
    layer, x = make_rnn(kind, return_state=True, flag=kind != "gru"), inputs()
    expected, statistics, last = dense(layer, kind, x, MASK)
    assert len(np.unique(statistics["steps"])) >= 3
    x[~MASK] = np.nan
    # Early exit: the steps' loops are inside the loop over the sequence.
    output, *states, ponder = layer(x, mask=MASK, return_ponder=True)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-3, atol=1e-4)
    states = np.concatenate([to_numpy(state) for state in states], axis=1)
    np.testing.assert_allclose(states, last, rtol=1e-3, atol=1e-4)
    assert_ponder_equal(ponder, statistics)
    cost = (statistics["steps"] + statistics["remainders"]).sum() / MASK.sum()
    np.testing.assert_allclose(to_numpy(layer.losses[0]), 0.01 * cost, rtol=1e-4)


def test_training_has_finite_gradients_and_none_at_padding():
    layer, x = make_rnn(), inputs()
    x[~MASK] = np.nan

    def loss(x):
        output = layer(x, mask=MASK, training=True)
        return ops.sum(output) + layer.losses[0]

    value, gradient = gradient_function(loss, with_value=True)(x)
    expected, statistics, _ = dense(layer, "simple", x, MASK)
    cost = (statistics["steps"] + statistics["remainders"]).sum() / MASK.sum()
    np.testing.assert_allclose(value, expected.sum() + 0.01 * cost, rtol=1e-4)
    assert np.isfinite(gradient).all() and (gradient[~MASK] == 0).all()
    assert (gradient[MASK] != 0).all()


def test_the_options_of_rnns():
    x = inputs()
    layer = make_rnn()
    expected, statistics, _ = dense(layer, "simple", x[:, ::-1])
    config = {**layer.get_config(), "return_sequences": False}
    for options in (dict(go_backwards=True), dict(unroll=True, go_backwards=True)):
        other = AdaptiveRNN.from_config({**config, **options})
        other.build((None, LENGTH, DIM))
        other.set_weights(layer.get_weights())
        output, ponder = other(x, return_ponder=True)
        np.testing.assert_allclose(
            to_numpy(output), expected[:, -1], rtol=1e-3, atol=1e-4
        )
        np.testing.assert_array_equal(
            to_numpy(ponder["steps"]), statistics["steps"][:, ::-1]
        )
    zeroed = AdaptiveRNN.from_config({**layer.get_config(), "zero_output_for_mask": 1})
    zeroed.build((None, LENGTH, DIM))
    zeroed.set_weights(layer.get_weights())
    output = to_numpy(zeroed(x, mask=MASK))
    assert (output[~MASK] == 0).all() and (output[MASK] != 0).all()


def test_a_stateful_rnn_goes_on():
    layer = make_rnn("lstm")
    expected, _, _ = dense(layer, "lstm", inputs())
    stateful = AdaptiveRNN.from_config({**layer.get_config(), "stateful": True})
    stateful.build((BATCH, LENGTH, DIM))
    stateful.set_weights(layer.get_weights())
    parts = [to_numpy(stateful(inputs()[:, part])) for part in (slice(2), slice(2, 5))]
    received = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-4)


def test_stacked_cells_with_dropout_fit_and_come_back(backend, tmp_path):
    cells = [
        keras.layers.SimpleRNNCell(3, dropout=0.2, recurrent_dropout=0.2),
        keras.layers.SimpleRNNCell(UNITS),
    ]
    cell = AdaptiveComputationTime(keras.layers.StackedRNNCells(cells), 2)
    sequence = keras.Input((LENGTH, DIM))
    x = keras.layers.Masking(0.0)(sequence)
    model = keras.Model(sequence, AdaptiveRNN(cell, dtype="mixed_bfloat16")(x))
    model.compile("adam", "mse", jit_compile=backend != "torch")
    data = np.where(MASK[..., None], inputs(), 0.0)
    history = model.fit(data, np.zeros((BATCH, UNITS)), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert_same_model(saved_and_loaded(model, tmp_path), model, data, rtol=0, atol=0)


def test_in_the_rnn_of_keras():
    layer, x = make_rnn("lstm", cost=0.0), inputs()
    expected, _, last = dense(layer, "lstm", x)
    plain = keras.layers.RNN(layer.cell, return_sequences=True, return_state=True)
    output, *states = plain(x)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-3, atol=1e-4)
    states = np.concatenate([to_numpy(state) for state in states], axis=1)
    np.testing.assert_allclose(states, last, rtol=1e-3, atol=1e-4)


def test_what_would_be_lost_is_refused():
    x = inputs()
    with pytest.raises(ValueError, match="AdaptiveRNN.*ponder_cost=0.01"):
        keras.layers.RNN(AdaptiveComputationTime(keras.layers.GRUCell(4), 3))(x)
    cell = keras.layers.GRUCell(4, dropout=0.5)
    cell = AdaptiveComputationTime(cell, 3, ponder_cost=0.0)
    with pytest.raises(ValueError, match="dropout"):
        keras.layers.RNN(cell)(x, training=True)
    with pytest.raises(TypeError, match="cell="):
        AdaptiveRNN(keras.layers.GRUCell(4))
    with pytest.raises(TypeError, match="cell="):
        AdaptiveRNN(AdaptiveComputationTime(keras.layers.Dense(4), 3))
