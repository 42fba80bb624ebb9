"""Kernels for TPUs, interpreted, on several devices against portable forms on one."""

import contextlib

import jax
import keras
import numpy as np
import pytest

from keras_efficient_attn.distribution import SequenceParallel
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.ops.common.plan import plan_for

BATCH, LENGTH, HEADS, DIM = 4, 40, 4, 8
WIDTH = HEADS * DIM
# The kernels of features, spans, decays, corrections, codes and intervals, and those
# that run for parts of a layer.
LAYERS = [
    "linear",
    "performer",
    "adaptive-span",
    "gated-linear",
    "gated-delta",
    "vq:window=8,num_codes=16",
    "local:window=8",
    "performer:window=8",
    "sparse:stride=8",
]


def data_parallel(size):
    return keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(size)])


def make_mesh(*shape):
    axes = ("batch", "model", "sequence")[: len(shape)]
    devices = [f"cpu:{i}" for i in range(np.prod(shape))]
    return keras.distribution.DeviceMesh(shape, axes, devices)


def model_parallel(mesh):
    layout_map = keras.distribution.LayoutMap(mesh)
    if HEADS % mesh.shape[1] == 0:
        layout_map[".*(query|key|value)/kernel"] = (None, "model", None)
    return keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def make_layer(name):
    keras.utils.set_random_seed(0)
    layer = get_attention(name, num_heads=HEADS, key_dim=DIM)
    shape = BATCH, LENGTH, WIDTH
    layer.build(shape, shape)
    return layer


def make_run(layer):
    """A function of inputs: the output and the gradients of a scalar of it."""
    weights = [v.value for v in layer.trainable_variables]
    fixed = [v.value for v in layer.non_trainable_variables]

    def loss(weights, x, mask):
        output, _ = layer.stateless_call(
            weights, fixed, x, x, key_mask=mask, use_causal_mask=True
        )
        return (jax.numpy.sin(output) * mask[..., None]).sum(), output

    def run(x, mask):
        grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, output), gradients = grads(weights, x, mask)
        return output * mask[..., None], gradients

    return run


def make_inputs():
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")
    mask = np.arange(LENGTH) < np.array([LENGTH, 20, LENGTH, 7])[:, None]
    return x, mask


def check(name, distribution, divides=True, scope=None):
    """Compares a layer's kernels on several devices with its portable form on one.

    Args:
        name: Name of a layer.
        distribution: `keras.distribution.Distribution`.
        divides: Whether it divides the rows of the batch.
        scope: Another context of the devices' program.
    """
    x, mask = make_inputs()
    output, gradients = jax.jit(make_run(make_layer(name)))(x, mask)
    with plan_for("tpu"), distribution.scope(), scope or contextlib.nullcontext():
        run = make_run(make_layer(name))
        if divides:
            place = keras.distribution.distribute_tensor
            x, mask = (
                place(t, distribution.get_data_layout(t.shape)) for t in (x, mask)
            )
        traced = jax.jit(run).trace(x, mask)
        received, received_gradients = traced.lower().compile()(x, mask)
    text = str(traced.jaxpr)
    assert "pallas_call" in text
    assert "shard_map" in text
    np.testing.assert_allclose(received, output, rtol=1e-4, atol=1e-5)
    flat = map(jax.tree.leaves, (received_gradients, gradients))
    for a, b in zip(*flat, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max() + 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_and_heads(name):
    check(name, model_parallel(make_mesh(2, 4)))


@pytest.mark.parametrize("name", ["linear", "gated-delta", "local:window=8"])
def test_rows(name):
    check(name, data_parallel(4))


@pytest.mark.parametrize("name", ["linear", "local:window=8"])
def test_rows_and_heads_that_devices_do_not_divide(name):
    check(name, model_parallel(make_mesh(2, 3)))
    check(name, data_parallel(3), divides=False)


def test_several_devices_without_a_distribution_have_no_kernel():
    with plan_for("tpu"):
        x, mask = make_inputs()
        traced = jax.jit(make_run(make_layer("linear"))).trace(x, mask)
    assert "pallas_call" not in str(traced.jaxpr)


@pytest.mark.parametrize("name", ["linear", "gated-delta"])
def test_rows_heads_and_positions(name):
    mesh = make_mesh(2, 2, 2)
    check(name, model_parallel(mesh), scope=SequenceParallel(mesh).scope())
