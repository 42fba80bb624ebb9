import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.benchmark import compile_function, workloads
from keras_efficient_attn.benchmark.execution import make_program
from keras_efficient_attn.benchmark.settings import MATMUL, Settings
from keras_efficient_attn.benchmark.worker import Measurement
from keras_efficient_attn.benchmark.workloads import DECODE_STEPS, build_workload
from keras_efficient_attn.layers import get_attention
from tests.benchmark.fakes import FakeClock

HEADS, HEAD_DIM, LENGTH = 2, 4, 12
WIDTH = HEADS * HEAD_DIM
ELU = "performer:feature_map=elu"
FAVOR = "performer:feature_map=favor+,num_features=32"


def task(contestant, **options):
    settings = Settings(
        layers=["softmax"], heads=HEADS, head_dim=HEAD_DIM, batch=2, **options
    )
    return settings.task(contestant, LENGTH)


def to_numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def draws(index=0):
    return np.random.default_rng((0, LENGTH, index))


def build(identifier):
    """The layer of a workload, with the weights from its seed."""
    keras.utils.set_random_seed(0)
    layer = get_attention(identifier, num_heads=HEADS, key_dim=HEAD_DIM)
    layer.build((2, LENGTH, WIDTH), (2, LENGTH, WIDTH))
    return layer


def test_gradients_are_those_of_every_argument():
    rng = np.random.default_rng(0)
    c, x, w = (rng.standard_normal((3, 3), "float32") for _ in range(3))
    program = compile_function(ops.matmul, gradients=True)
    results = program(*(ops.convert_to_tensor(a) for a in (c, x, w)))
    for result, expected in zip(results, [x @ w, c @ w.T, x.T @ c], strict=True):
        np.testing.assert_allclose(to_numpy(result), expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_function_accepts_several_shapes_and_types():
    program = compile_function(lambda pair: pair["x"] * pair["x"] + pair["y"])
    for shape, dtype in (((3,), "float32"), ((2, 4), "float32"), ((3,), "int32")) * 2:
        pair = {"x": 3 * ops.ones(shape, dtype), "y": ops.ones(shape, dtype)}
        result = program(pair)
        assert keras.backend.standardize_dtype(result.dtype) == dtype
        np.testing.assert_array_equal(to_numpy(result), np.full(shape, 10))


@pytest.mark.parametrize("contestant", ["softmax", ELU])
def test_training_gives_the_gradients_of_the_input_and_every_weight(contestant):
    workload = build_workload(task(contestant, mode="train", causal=True))
    cotangent, x = workload.make_inputs(draws())
    results = [to_numpy(r) for r in workload.program(cotangent, x)]
    layer = build(contestant)
    weights = layer.trainable_variables
    assert len(weights) == 8
    shapes = [tuple(x.shape)] * 2 + [tuple(weight.shape) for weight in weights]
    assert [result.shape for result in results[: len(shapes)]] == shapes
    expected = to_numpy(layer(x, x, use_causal_mask=True))
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-5)
    # The gradient of the output's bias is the sum of the cotangent.
    np.testing.assert_allclose(
        results[len(shapes) - 1], to_numpy(cotangent).sum((0, 1)), rtol=1e-4, atol=1e-5
    )
    # Along the gradient, <output, cotangent> grows by its squared length.
    step = 1e-2 / np.linalg.norm(results[1])
    moved = ops.convert_to_tensor(to_numpy(x) + step * results[1])
    change = to_numpy(layer(moved, moved, use_causal_mask=True)) - expected
    growth = np.sum(change * to_numpy(cotangent)) / step
    np.testing.assert_allclose(growth, np.sum(results[1] ** 2), rtol=2e-2)


def test_causal_is_causal():
    for causal in (False, True):
        workload = build_workload(task("softmax", causal=causal))
        (x,) = workload.make_inputs(draws())
        changed = to_numpy(x).copy()
        changed[:, -1] += 10.0
        outputs = workload.program(x), workload.program(ops.convert_to_tensor(changed))
        first, second = (to_numpy(output)[:, :-1] for output in outputs)
        assert np.allclose(first, second) is causal


def test_inputs_are_new_every_time_and_the_same_for_all():
    softmax, linear = (build_workload(task(name)) for name in ("softmax", ELU))
    first, other = (to_numpy(softmax.make_inputs(draws(i))[0]) for i in (0, 1))
    assert not np.any(first == other)
    assert np.array_equal(first, to_numpy(linear.make_inputs(draws(0))[0]))


@pytest.mark.parametrize("contestant", ["softmax", ELU, f"{FAVOR},window=3"])
def test_decoding_is_the_sequence_one_position_at_a_time(contestant, monkeypatch):
    monkeypatch.setattr(workloads, "SEGMENT", 5)  # Two segments, remainder two.
    layer = get_attention(contestant, num_heads=HEADS, key_dim=HEAD_DIM)
    total = LENGTH + 5
    layer.build((2, total, WIDTH), (2, total, WIDTH))
    x = keras.random.normal((2, total, WIDTH))

    def step(x, state):
        return layer(x, x, use_causal_mask=True, state=state)

    def run(x):
        state = layer.get_initial_state(2, total)
        state = workloads.read_segments(step, x[:, :LENGTH], state)
        return workloads.generate_positions(step, x[:, LENGTH:], state)[0]

    expected = to_numpy(layer(x, x, use_causal_mask=True))[:, LENGTH:]
    result = to_numpy(make_program(run, layer)(x))
    np.testing.assert_allclose(
        result, expected.sum(1, keepdims=True), rtol=1e-4, atol=1e-5
    )


def test_decoding_is_timed_per_position():
    clock = FakeClock()
    measurement = Measurement(task(ELU, mode="decode"), clock, build_slow(clock))
    prepared = measurement.prepare()
    assert (prepared["steps"], prepared["tokens"]) == (DECODE_STEPS, 2)
    assert prepared["first"] == measurement.repeat(0)["seconds"] == 3.0


def build_slow(clock):
    """Builds workloads whose inputs take 100 s on `clock`, and a call 3 s."""

    def slow(function, seconds):
        def call(*args):
            clock.sleep(seconds)
            return function(*args)

        return call

    def build(task):
        workload = build_workload(task)
        return dataclasses.replace(
            workload,
            make_inputs=slow(workload.make_inputs, 100.0),
            program=slow(workload.program, 3.0),
        )

    return build


def test_an_optimizer_takes_its_step():
    layer = keras.layers.Dense(3)
    layer.build((2, 4))
    optimizer = keras.optimizers.SGD(learning_rate=0.5, momentum=0.9)
    optimizer.build(layer.trainable_variables)
    x, cotangent = keras.random.normal((2, 4)), keras.random.normal((2, 3))
    before = [to_numpy(variable) for variable in layer.trainable_variables]
    expected = to_numpy(layer(x))
    gradients = to_numpy(x).T @ to_numpy(cotangent), to_numpy(cotangent).sum(0)
    program = make_program(layer, layer, gradients=True, optimizer=optimizer)
    output, _ = program(cotangent, x)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-5, atol=1e-6)
    weights = layer.trainable_variables
    for weight, start, gradient in zip(weights, before, gradients, strict=True):
        np.testing.assert_allclose(
            to_numpy(weight), start - 0.5 * gradient, rtol=1e-4, atol=1e-5
        )
    assert int(to_numpy(optimizer.iterations)) == 1


def test_a_training_step_keeps_what_the_layer_assigns():
    """Otherwise a codebook is drawn in every step that is timed."""
    layer = get_attention("vq:num_codes=4", num_heads=HEADS, key_dim=HEAD_DIM)
    x, cotangent = (keras.random.normal((2, LENGTH, WIDTH)) for _ in range(2))
    layer.build(x.shape, x.shape)
    before = [to_numpy(variable) for variable in layer.non_trainable_variables]

    def run(x):
        return layer(x, x, training=True)

    make_program(run, layer, gradients=True)(cotangent, x)
    after = [to_numpy(variable) for variable in layer.non_trainable_variables]
    changed = [np.any(b != a) for b, a in zip(before, after, strict=True)]
    assert sum(changed) > 1


def test_error_is_that_against_keras_own_layer():
    measurement = Measurement(task(FAVOR, causal=True), FakeClock())
    workload = build_workload(task(FAVOR, causal=True))
    (x,) = workload.make_inputs(draws())
    layer = build(FAVOR)
    softmax = build("softmax")
    softmax.set_weights([to_numpy(w) for w in layer.trainable_variables])
    exact = to_numpy(softmax(x, x, use_causal_mask=True))
    output = to_numpy(layer(x, x, use_causal_mask=True))
    # With fewer positions than samples, all count.
    expected = np.linalg.norm(output - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(measurement.check()["error"], expected, rtol=1e-3)


def test_the_error_of_hashed_attention_is_that_against_all_pairs():
    lsh = "reformer:bucket_size=2,num_buckets=2,num_hashes=1"
    measurement = Measurement(task(lsh, causal=True), FakeClock())
    (x,) = measurement._workload.make_inputs(draws())
    layer, dense = build(lsh), build(f"{lsh},dense_length={LENGTH}")
    dense.set_weights(layer.get_weights())
    exact, output = (
        to_numpy(attention(x, x, use_causal_mask=True)) for attention in (dense, layer)
    )
    expected = np.linalg.norm(output - exact) / np.linalg.norm(exact)
    assert expected > 0.01
    np.testing.assert_allclose(measurement.check()["error"], expected, rtol=1e-3)


@pytest.mark.parametrize(
    "identifier, expected",
    [
        ("softmax", False),
        (ELU, False),
        ("performer:feature_map=relu", False),
        (FAVOR, True),
        (f"{FAVOR},window=3", True),
        ("performer:feature_map=taylor", True),
        (f"{FAVOR},qk_norm=True", False),
        (f"{FAVOR},normalize=False", False),
        (f"{FAVOR},temperature=2.0", False),
        (f"{FAVOR},rotary_wavelength=100", False),
        ("vq", False),
        ("vq:qk_norm=False", True),
        ("vq:qk_norm=False,relative_positions=True", False),
        ("reformer", True),
        ("reformer:num_local_heads=1", False),
    ],
)
def test_which_layers_approximate_softmax(identifier, expected):
    layer = get_attention(identifier, num_heads=HEADS, key_dim=HEAD_DIM)
    assert layer.estimates_softmax is expected


def test_the_matmul_knows_its_operations():
    workload = build_workload(task(MATMUL, matmul_size=5))
    x, y = workload.make_inputs(draws())
    np.testing.assert_allclose(
        to_numpy(workload.program(x, y)), to_numpy(x) @ to_numpy(y), rtol=1e-4
    )
    assert workload.operations == 250


def test_outputs_that_are_not_finite_are_noticed():
    measurement = Measurement(task(MATMUL, matmul_size=4), FakeClock())
    assert measurement.prepare()["finite"]
    inputs = measurement._workload.make_inputs
    measurement._workload.make_inputs = lambda rng: [x * np.inf for x in inputs(rng)]
    assert not measurement.prepare()["finite"]
