"""The scan against a plain loop, in values, gradients and what it stores."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops.recompute import (
    recompute_scan,
    vector_jacobian_product,
)
from tests.autodiff import gradients, to_numpy

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
    """The derivative of `step` by hand; `y` is given, and so is not computed again."""
    (total,), (a, b), (scale,) = carry, x, consts
    of_product, of_sum = y_gradient
    new_total = ops.tanh(total @ scale + a)
    of_total = carry_gradient[0] + of_product * b + of_sum[:, None]
    of_inside = of_total * (1 - new_total * new_total)
    return (
        (of_inside @ ops.transpose(scale),),
        (of_inside, of_product * new_total),
        (ops.transpose(total) @ of_inside,),
    )


def tracked_gradient(*arguments):
    """`step_gradient` through the derivative of `step` that the backend makes."""
    carry, x, consts, _, carry_gradient, y_gradient = arguments

    def flat(carry, x, consts):
        carry, y = step(carry, x, consts)
        return (*carry, None, *y)

    _, pull = vector_jacobian_product(flat, (carry, x, consts))
    return pull((*carry_gradient, None, *y_gradient))


def scanned(total, a, b, scale, gradient=None):
    return recompute_scan(step, (total,), (a, b), (scale,), gradient)


def looped(total, a, b, scale):
    """The same by hand, in NumPy float64."""
    ys, sums = [], []
    for i in range(len(a)):
        total = np.tanh(total @ scale + a[i])
        ys.append(total * b[i])
        sums.append(total.sum(-1))
    return total, np.stack(ys), np.stack(sums)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_values(steps):
    total, a, b, scale = arrays()
    values = (total, a[:steps], b[:steps], scale)
    (last,), (ys, sums) = scanned(*(ops.convert_to_tensor(x) for x in values))
    expected = looped(*(x.astype("float64") for x in values))
    for ours, theirs in zip((last, ys, sums), expected, strict=True):
        np.testing.assert_allclose(to_numpy(ours), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", [None, step_gradient, tracked_gradient])
def test_gradients_are_the_slopes_of_the_loop(gradient):
    values = arrays()
    random = np.random.default_rng(1)

    def loss(*tensors):
        (last,), (ys, sums) = scanned(*tensors, gradient)
        return ops.sum(last) + ops.sum(ops.sin(ys)) + ops.sum(ops.square(sums))

    def loop_loss(*arrays):
        last, ys, sums = looped(*arrays)
        return last.sum() + np.sin(ys).sum() + (sums**2).sum()

    wide = [value.astype("float64") for value in values]
    for i, slopes in enumerate(gradients(loss, *values)):
        direction = random.normal(size=slopes.shape)

        def moved(step, i=i, direction=direction):
            return loop_loss(*wide[:i], wide[i] + step * direction, *wide[i + 1 :])

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        assert abs((slopes * direction).sum() - slope) < 1e-3 * (1 + abs(slope))


def test_a_gradient_by_hand_is_the_one_that_runs(backend):
    if backend == "jax":
        pytest.skip("JAX takes the automatic derivative")

    def doubled(*arguments):
        return tuple(
            tuple(2 * tensor for tensor in group) for group in step_gradient(*arguments)
        )

    def loss(total, a, b, scale, gradient):
        return ops.sum(scanned(total, a, b, scale, gradient)[0][0])

    values = [x[:1] if i in (1, 2) else x for i, x in enumerate(arrays())]
    single = gradients(lambda *tensors: loss(*tensors, step_gradient), *values)
    double = gradients(lambda *tensors: loss(*tensors, doubled), *values)
    np.testing.assert_allclose(double[1], 2 * single[1], rtol=1e-6)


def test_a_gradient_by_hand_without_a_carry():
    def squares(carry, x, consts):
        return carry, (x[0] * x[0] * consts[0],)

    def by_hand(carry, x, consts, y, carry_gradient, y_gradient):
        (of_y,) = y_gradient
        of_const = ops.sum(of_y * x[0] * x[0], axis=0)
        return (), (2 * of_y * x[0] * consts[0],), (of_const,)

    def loss(x, const):
        return ops.sum(recompute_scan(squares, (), (x,), (const,), by_hand)[1][0])

    _, x, _, scale = arrays()
    of_x, of_const = gradients(loss, x, scale[0])
    np.testing.assert_allclose(of_x, 2 * x * scale[0], rtol=1e-5)
    np.testing.assert_allclose(of_const, (x**2).sum((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("gradient", [None, step_gradient])
def test_an_unused_output_costs_no_gradient(gradient):
    values = arrays()

    def loss(*tensors):
        return ops.sum(scanned(*tensors, gradient)[0][0])

    _, _, of_b, _ = gradients(loss, *values)
    np.testing.assert_array_equal(of_b, np.zeros_like(of_b))


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

        compiled = jax.jit(jax.grad(loss)).lower(np.ones((length, 8), "float32"))
        return compiled.compile().memory_analysis().temp_size_in_bytes

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
            loss = tf.reduce_sum(tf.sin(scanned(total, a, b, scale)[1][0]))
        slope = tf.reduce_sum(inner.gradient(loss, total) ** 2)
    with pytest.raises(NotImplementedError, match="Second derivatives"):
        outer.gradient(slope, total)


def test_an_unknown_backend_is_named(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(ValueError, match="'numpy'"):
        recompute_scan(step, (), (np.zeros((1, 1)),))
