"""The scan against a plain loop: values, gradients and stored tensors."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.common.backend import known_backend
from keras_efficient_attn.ops.common.scan import recompute_scan, vector_jacobian_product
from tests.autodiff import assert_slope, gradients, to_numpy
from tests.largest_tensor import temporary_bytes

STEPS = 7


def step(carry, x, consts):
    (total,), (a, b), (scale,) = carry, x, consts
    total = ops.tanh(total @ scale + a)
    return (total,), (total * b, ops.sum(total, axis=-1))


def arrays():
    random = np.random.default_rng(0)
    shapes = [(3, 4), (STEPS, 3, 4), (STEPS, 3, 4), (4, 4)]
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def step_gradient(carry, x, consts, y, carry_gradient, y_gradient):
    """The handwritten derivative of `step`; reuses the given `y`."""
    (total,), (a, b), (scale,) = carry, x, consts
    grad_product, grad_sum = y_gradient
    new_total = ops.tanh(total @ scale + a)
    grad_total = carry_gradient[0] + grad_product * b + grad_sum[:, None]
    grad_inside = grad_total * (1 - new_total * new_total)
    return (
        (grad_inside @ ops.transpose(scale),),
        (grad_inside, grad_product * new_total),
        (ops.transpose(total) @ grad_inside,),
    )


def gradient_by_autodiff(*arguments):
    """`step_gradient` by the backend's derivative of `step`."""
    carry, x, consts, _, carry_gradient, y_gradient = arguments

    def flat(carry, x, consts):
        carry, y = step(carry, x, consts)
        return (*carry, None, *y)

    _, pull = vector_jacobian_product(flat, (carry, x, consts))
    return pull((*carry_gradient, None, *y_gradient))


def run_scan(total, a, b, scale, gradient=None, reverse=False):
    arguments = step, (total,), (a, b), (scale,), gradient
    return recompute_scan(*arguments, reverse=reverse)


def run_backwards(*arguments):
    return run_scan(*arguments, reverse=True)


def run_loop(total, a, b, scale):
    """The same loop in NumPy float64."""
    ys, sums = [], []
    for i in range(len(a)):
        total = np.tanh(total @ scale + a[i])
        ys.append(total * b[i])
        sums.append(total.sum(-1))
    return total, np.stack(ys), np.stack(sums)


def run_loop_backwards(total, a, b, scale):
    total, ys, sums = run_loop(total, a[::-1], b[::-1], scale)
    return total, ys[::-1], sums[::-1]


DIRECTIONS = [(run_scan, run_loop), (run_backwards, run_loop_backwards)]


@pytest.mark.parametrize(("scan", "loop"), DIRECTIONS)
@pytest.mark.parametrize("steps", [1, STEPS])
def test_values(steps, scan, loop):
    total, a, b, scale = arrays()
    values = (total, a[:steps], b[:steps], scale)
    (last,), (ys, sums) = scan(*(ops.convert_to_tensor(x) for x in values))
    expected = loop(*(x.astype("float64") for x in values))
    for ours, theirs in zip((last, ys, sums), expected, strict=True):
        np.testing.assert_allclose(to_numpy(ours), theirs, rtol=1e-5, atol=1e-6)


def check_slopes(scan, loop, gradient, values):
    """Compares a scan's gradients with finite differences of the loop, in float64."""

    def loss(*tensors):
        (last,), (ys, sums) = scan(*tensors, gradient)
        return ops.sum(last) + ops.sum(ops.sin(ys)) + ops.sum(ops.square(sums))

    def loop_loss(*arrays):
        last, ys, sums = loop(*arrays)
        return last.sum() + np.sin(ys).sum() + (sums**2).sum()

    for i, slopes in enumerate(gradients(loss, *values)):
        assert_slope(slopes, loop_loss, values, i, step=1e-6, tolerance=2e-6)


@pytest.mark.parametrize(("scan", "loop"), DIRECTIONS)
@pytest.mark.parametrize("gradient", [None, step_gradient, gradient_by_autodiff])
def test_gradients_are_the_slopes_of_the_loop(gradient, scan, loop):
    check_slopes(scan, loop, gradient, arrays())


def test_a_gradient_by_hand_is_the_one_that_runs(backend):
    if backend == "jax":
        pytest.skip("JAX takes the automatic derivative")

    def double_carry(*arguments):
        return tuple(
            tuple(2 * tensor for tensor in group) for group in step_gradient(*arguments)
        )

    def loss(total, a, b, scale, gradient):
        return ops.sum(run_scan(total, a, b, scale, gradient)[0][0])

    values = [x[:1] if i in (1, 2) else x for i, x in enumerate(arrays())]
    single = gradients(lambda *tensors: loss(*tensors, step_gradient), *values)
    double = gradients(lambda *tensors: loss(*tensors, double_carry), *values)
    np.testing.assert_allclose(double[1], 2 * single[1], rtol=1e-6)


def test_a_gradient_by_hand_without_a_carry():
    def squares(carry, x, consts):
        return carry, (x[0] * x[0] * consts[0],)

    def by_hand(carry, x, consts, y, carry_gradient, y_gradient):
        (grad_y,) = y_gradient
        grad_const = ops.sum(grad_y * x[0] * x[0], axis=0)
        return (), (2 * grad_y * x[0] * consts[0],), (grad_const,)

    def loss(x, const):
        return ops.sum(recompute_scan(squares, (), (x,), (const,), by_hand)[1][0])

    _, x, _, scale = arrays()
    grad_x, grad_const = gradients(loss, x, scale[0])
    np.testing.assert_allclose(grad_x, 2 * x * scale[0], rtol=1e-5)
    np.testing.assert_allclose(grad_const, (x**2).sum((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("gradient", [None, step_gradient])
def test_an_unused_output_costs_no_gradient(gradient):
    values = arrays()

    def loss(*tensors):
        return ops.sum(run_scan(*tensors, gradient)[0][0])

    _, _, grad_b, _ = gradients(loss, *values)
    np.testing.assert_array_equal(grad_b, np.zeros_like(grad_b))


@pytest.mark.usefixtures("on_cpu")
def test_intermediates_are_not_stored_on_torch(backend):
    if backend != "torch":
        pytest.skip("counts what PyTorch's autograd saves")
    import torch

    wide = 4096

    def wasteful(carry, x, consts):
        blown_up = ops.sin(x[0][:, None] * ops.ones((1, wide)))
        return carry, (ops.sum(blown_up * blown_up, axis=-1),)

    x = torch.ones((STEPS, 8), requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, (y,) = recompute_scan(wasteful, (), (x,))
    assert sum(saved) < wide
    y.sum().backward()
    assert torch.all(torch.isfinite(x.grad))


def test_memory_of_the_compiled_program_does_not_grow_with_the_features(backend):
    if backend != "jax":
        pytest.skip("reads the size of XLA's temporaries")
    import jax

    def temporaries(length):
        def wasteful(carry, x, consts):
            blown_up = ops.sin(x[0][:, None] * ops.ones((1, 4096)))
            return carry, (ops.sum(blown_up * blown_up, axis=-1),)

        def loss(x):
            return ops.sum(recompute_scan(wasteful, (), (x,))[1][0])

        return temporary_bytes(jax.grad(loss), np.ones((length, 8), "float32"))

    stored = 8 * 4096 * 4
    assert temporaries(64) - temporaries(4) < 10 * stored


def test_second_derivatives_are_refused_on_tensorflow(backend):
    if backend != "tensorflow":
        pytest.skip("elsewhere the backend sees to it")
    import tensorflow as tf

    total, a, b, scale = (tf.constant(x) for x in arrays())
    with tf.GradientTape() as outer:
        outer.watch(total)
        with tf.GradientTape() as inner:
            inner.watch(total)
            loss = tf.reduce_sum(tf.sin(run_scan(total, a, b, scale)[1][0]))
        slope = tf.reduce_sum(inner.gradient(loss, total) ** 2)
    with pytest.raises(NotImplementedError, match="Second derivatives"):
        outer.gradient(slope, total)


SIZE = 3


def positions_step(carry, x, consts):
    (total,), (a, b), (scale,) = carry, x, consts
    total = ops.tanh(total @ scale + ops.sum(a, axis=1))
    return (total,), (total[:, None] * b, ops.sum(a * b, axis=-1))


def positions_gradient(carry, x, consts, y, carry_gradient, y_gradient):
    """The handwritten derivative of `positions_step`."""
    (total,), (a, b), (scale,) = carry, x, consts
    grad_product, grad_sum = y_gradient
    new_total = ops.tanh(total @ scale + ops.sum(a, axis=1))
    grad_total = carry_gradient[0] + ops.sum(grad_product * b, axis=1)
    grad_inside = grad_total * (1 - new_total * new_total)
    return (
        (grad_inside @ ops.transpose(scale),),
        (
            grad_inside[:, None] + grad_sum[..., None] * b,
            grad_product * new_total[:, None] + grad_sum[..., None] * a,
        ),
        (ops.transpose(total) @ grad_inside,),
    )


def positions_arrays(steps=STEPS):
    random = np.random.default_rng(0)
    shapes = [(2, 4), (2, steps * SIZE, 4), (2, steps * SIZE, 4), (4, 4)]
    return [random.normal(size=shape).astype("float32") for shape in shapes]


def scan_by_position(total, a, b, scale, gradient=None):
    steps = a.shape[1] // SIZE
    return recompute_scan(
        positions_step, (total,), (a, b), (scale,), gradient, num_steps=steps
    )


def loop_by_position(total, a, b, scale):
    """The same loop in NumPy float64."""
    ys = []
    for start in range(0, a.shape[1], SIZE):
        here = slice(start, start + SIZE)
        total = np.tanh(total @ scale + a[:, here].sum(1))
        ys.append(total[:, None] * b[:, here])
    return total, np.concatenate(ys, 1), (a * b).sum(-1)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_values_of_steps_along_positions(steps):
    values = positions_arrays(steps)
    (last,), (ys, sums) = scan_by_position(*map(ops.convert_to_tensor, values))
    expected = loop_by_position(*(x.astype("float64") for x in values))
    for ours, theirs in zip((last, ys, sums), expected, strict=True):
        np.testing.assert_allclose(to_numpy(ours), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("gradient", [None, positions_gradient])
def test_gradients_of_steps_along_positions(gradient, steps):
    check_slopes(scan_by_position, loop_by_position, gradient, positions_arrays(steps))


@pytest.mark.parametrize("gradient", [None, positions_gradient])
def test_second_derivatives_of_steps_along_positions(backend, gradient):
    if backend != "jax":
        pytest.skip("JAX alone has second derivatives")
    import jax

    values = positions_arrays()
    random = np.random.default_rng(1)
    first, second = (random.normal(size=values[1].shape) for _ in range(2))

    def loss(a):
        return ops.sum(scan_by_position(values[0], a, *values[2:], gradient)[0][0])

    def slope(a):
        return ops.sum(jax.grad(loss)(a) * first.astype("float32"))

    def move(x, y):
        wide = [value.astype("float64") for value in values]
        wide[1] = wide[1] + x * first + y * second
        return loop_by_position(*wide)[0].sum()

    h = 1e-4
    corners = [i * j * move(i * h, j * h) for i in (1, -1) for j in (1, -1)]
    expected = sum(corners) / (4 * h * h)
    for received in (
        (np.asarray(jax.grad(slope)(values[1])) * second).sum(),
        jax.jvp(slope, (values[1],), (second.astype("float32"),))[1],
    ):
        assert abs(received - expected) < 1e-3 * (1 + abs(expected))


def test_steps_along_positions_get_their_outputs():
    def squares(carry, x, consts):
        return carry, (x[0] * x[0],)

    def by_hand(carry, x, consts, y, carry_gradient, y_gradient):
        # The derivative of x² from y alone: 2 √y.
        return (), (2 * ops.sqrt(y[0]) * y_gradient[0],), ()

    def loss(x):
        (ys,) = recompute_scan(squares, (), (x,), (), by_hand, num_steps=STEPS)[1]
        places = ops.arange(STEPS * SIZE, dtype="float32")
        return ops.sum(ys * places[None, :, None])

    x = np.abs(positions_arrays()[1]) + 0.1
    expected = 2 * x * np.arange(STEPS * SIZE)[None, :, None]
    np.testing.assert_allclose(gradients(loss, x)[0], expected, rtol=1e-5)


def test_a_gradient_by_hand_without_outputs():
    def running_sum(carry, x, consts):
        return (carry[0] + ops.sum(x[0], axis=1),), ()

    def by_hand(carry, x, consts, y, carry_gradient, y_gradient):
        return carry_gradient, (x[0] * 0 + carry_gradient[0][:, None],), ()

    def loss(total, x):
        scanned = recompute_scan(
            running_sum, (total,), (x,), (), by_hand, num_steps=STEPS
        )
        return ops.sum(scanned[0][0] ** 2)

    total, x, _, _ = positions_arrays()
    expected = np.broadcast_to(2 * (total + x.sum(1))[:, None], x.shape)
    np.testing.assert_allclose(gradients(loss, total, x)[1], expected, rtol=1e-4)


def test_integers_that_every_step_reads_have_no_gradient():
    def shift_carry(carry, x, consts):
        return carry, (x[0] * ops.cast(consts[0], "float32") * consts[1],)

    shift = ops.convert_to_tensor(np.array([3], "int32"))

    def loss(x, factor):
        scan = recompute_scan(shift_carry, (), (x,), (shift, factor), num_steps=STEPS)
        return ops.sum(scan[1][0])

    _, x, _, _ = positions_arrays()
    grad_x, grad_factor = gradients(loss, x, np.full(1, 2.0, "float32"))
    np.testing.assert_allclose(grad_x, np.full_like(x, 6))
    np.testing.assert_allclose(grad_factor, [3 * x.sum()], rtol=1e-4)


@pytest.mark.parametrize("by_hand", [False, True])
def test_integers_of_steps_are_exact_and_have_no_gradient(by_hand):
    # Float32 has no odd integers there.
    first = 2**24

    def factor(position):
        return ops.cast(position - first, "float32")[..., None]

    def multiply(carry, x, consts):
        return carry, (x[0] * factor(x[1]),)

    def gradient(carry, x, consts, y, grad_carry, grad_y):
        return (), (grad_y[0] * factor(x[1]), ops.zeros_like(x[1])), ()

    _, x, _, _ = positions_arrays()
    steps = np.arange(x.shape[1], dtype="int32")
    positions = np.broadcast_to(first + steps, x.shape[:2])

    def loss(x):
        xs = x, ops.convert_to_tensor(positions)
        by = gradient if by_hand else None
        (y,) = recompute_scan(multiply, (), xs, gradient=by, num_steps=STEPS)[1]
        return ops.sum(y)

    (grad_x,) = gradients(loss, x)
    np.testing.assert_allclose(grad_x, np.broadcast_to(steps[:, None], x.shape))


def test_steps_of_a_symbolic_length_are_taken_one_by_one(backend):
    if backend != "jax":
        pytest.skip("JAX exports symbolic lengths")
    import jax

    def wasteful(carry, x, consts):
        blown_up = ops.sin(x[0][..., None] * ops.ones((1, 4096)))
        return carry, (ops.sum(blown_up * blown_up, axis=-1),)

    def f(x):
        steps = x.shape[1] // SIZE
        scan = recompute_scan(wasteful, (), (x,), num_steps=steps, step_size=SIZE)
        return scan[1][0]

    (length,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((2, SIZE * length), "float32")
    program = jax.export.export(jax.jit(f))(shape)
    x = np.random.default_rng(0).normal(size=(2, SIZE * 64)).astype("float32")
    np.testing.assert_allclose(program.call(x), 4096 * np.sin(x) ** 2, rtol=1e-3)
    assert temporary_bytes(program.call, x) < 10 * 2 * SIZE * 4096 * 4


def test_the_size_of_a_step_is_known_where_their_number_is_not(backend):
    if backend != "tensorflow":
        pytest.skip("TensorFlow alone traces unknown lengths")
    import tensorflow as tf

    seen = []

    def step(carry, x, consts):
        seen.append(x[0].shape[1])
        return carry, (2 * x[0],)

    @tf.function(input_signature=[tf.TensorSpec((None, None, 2))])
    def f(x):
        steps = tf.shape(x)[1] // SIZE
        scan = recompute_scan(step, (), (x,), num_steps=steps, step_size=SIZE)
        return scan[1][0]

    for steps in (1, STEPS):
        x = np.random.default_rng(0).normal(size=(3, steps * SIZE, 2))
        np.testing.assert_allclose(f(x.astype("float32")), 2 * x, rtol=1e-6)
    assert set(seen) == {SIZE}


@pytest.mark.usefixtures("on_cpu")
def test_steps_along_positions_copy_no_input(backend):
    if backend != "jax":
        pytest.skip("reads the size of XLA's temporaries")

    def running_sum(carry, x, consts):
        return (carry[0] + ops.sum(x[0], axis=1),), ()

    x = np.zeros((4, 1024, 64), "float32")

    def total(x):
        start = (ops.zeros((4, 64)),)
        return recompute_scan(running_sum, start, (x,), num_steps=16)[0][0]

    assert temporary_bytes(total, x) < x.nbytes / 4


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'numpy'"):
        known_backend("numpy")


def attend_in_step(carry, x, consts):
    query, key, value = x
    weights = ops.exp(query @ ops.swapaxes(key, -1, -2))
    y = weights @ value + carry[0][:, None]
    return (carry[0] + ops.sum(value, axis=1),), (y,)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="a program of XLA")
def test_no_loop_copies_the_tensors_that_it_reads():
    import jax

    def loss(x):
        xs = tuple(x * factor for factor in (2.0, 3.0, 4.0))
        carry = (ops.zeros((1, 8)),)
        _, (y,) = recompute_scan(attend_in_step, carry, xs, num_steps=10)
        return ops.sum(ops.square(y))

    program = jax.jit(jax.grad(loss)).lower(np.ones((1, 640, 8), "float32"))
    assert not re.findall(r"= f32\[1,640,8\]\S* copy\(", program.compile().as_text())
