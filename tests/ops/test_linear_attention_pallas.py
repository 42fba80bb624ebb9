"""The kernels for TPUs, interpreted by Pallas and lowered for a TPU."""

import dataclasses

import keras
import numpy as np
import pytest

from keras_efficient_attn.ops import linear_attention
from tests.ops.linear_attention_cases import (
    CASES,
    Case,
    assert_close,
    check_pieces,
    favor,
    weighed_sum,
    with_gradients,
)

if keras.backend.backend() != "jax":
    pytest.skip("Pallas is JAX's", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.common.feature_kernels import pallas


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Two chunks per program, so that short sequences need several programs."""
    monkeypatch.setattr(pallas, "BLOCK", 256)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_the_reference(case):
    arrays, mask = case.draw()
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, "float64") for name, x in arrays.items()}
        correct = with_gradients(lambda x: case.definition(x, mask))(wide)
        correct = jax.tree.map(np.asarray, correct)
        assert correct["0"].dtype == "float64"
    if mask is not None:
        for name in ("key", "value"):
            arrays[name][~mask] = np.nan
    received = with_gradients(lambda x: case.fast(x, mask, "pallas"))(arrays)
    assert_close(received, correct)


@pytest.mark.parametrize("case", [Case(length=300), favor(length=100)])
def test_bfloat16_is_added_up_in_float32(case):
    case = dataclasses.replace(case, dtype="bfloat16")
    arrays, _ = case.draw()
    for name in ("query", "key", "value"):
        arrays[name] = np.asarray(jnp.asarray(arrays[name], "bfloat16"), "float32")
    correct = with_gradients(lambda x: case.definition(x, None))(arrays)
    received = with_gradients(lambda x: case.fast(x, None, "pallas"))(arrays)
    assert received["0"].dtype == "bfloat16"
    for name, expected in correct.items():
        error = np.asarray(received[name], "float32") - expected
        assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.01, name


def test_the_past_does_not_depend_on_the_future():
    case = favor(length=300)
    arrays, _ = case.draw()
    attend = jax.jit(lambda x: case.fast(x, None, "pallas")[0])
    first = attend(arrays)
    # New arrays: JAX may still read the old ones.
    changed = dict(arrays)
    for name in ("query", "key", "value"):
        changed[name] = arrays[name].copy()
        changed[name][:, 200:] = 1e3 * arrays[name][:, 200:] + 1
    second = attend(changed)
    np.testing.assert_array_equal(first[:, :200], second[:, :200])
    assert np.all(first[:, 200:] != second[:, 200:])


def test_no_memory_is_read_that_was_not_written(monkeypatch):
    monkeypatch.setattr(pallas, "BLOCK", 128)
    case = favor(
        length=150, dims=(4, 3), masked=True, with_state=True, output="partial"
    )
    arrays, mask = case.draw()
    expected = with_gradients(lambda x: case.definition(x, mask))(arrays)
    poison = pltpu.InterpretParams(uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(poison):
        received = with_gradients(lambda x: case.fast(x, mask, "pallas"))(arrays)
    for name, correct in expected.items():
        limit = 1e-4 * np.abs(correct).max()
        np.testing.assert_allclose(received[name], correct, atol=limit, err_msg=name)


LOWERED = {
    "elu": Case(dims=(128, 128), length=8192, dtype="bfloat16"),
    "favor": favor(rows=622, dims=(128, 128), masked=True, length=1000),
    "state": Case(dims=(64, 40), with_state=True, weighted=True, output="partial"),
}


@pytest.mark.parametrize("case", LOWERED.values(), ids=LOWERED)
def test_kernels_and_their_gradients_are_lowered_for_a_tpu(case):
    arrays, mask = case.draw()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)

    def gradients(arrays):
        return jax.value_and_grad(lambda x: weighed_sum(case.fast(x, mask, "pallas")))(
            arrays
        )

    exported = jax.export.export(jax.jit(gradients), platforms=["tpu"])(shapes)
    assert exported.mlir_module().count("@tpu_custom_call") == 3


def test_one_position_and_a_state_need_no_kernel():
    case = Case(length=1, with_state=True)
    arrays, _ = case.draw()
    jaxpr = str(jax.make_jaxpr(lambda x: case.fast(x, None, "pallas"))(arrays))
    assert "pallas_call" not in jaxpr
    longer = dataclasses.replace(case, length=2).draw()[0]
    jaxpr = str(jax.make_jaxpr(lambda x: case.fast(x, None, "pallas"))(longer))
    assert "pallas_call" in jaxpr


def test_without_a_tpu_chunks_are_chosen():
    arrays = Case().draw()[0]
    x = arrays["query"]
    jaxpr = str(jax.make_jaxpr(lambda x: linear_attention(x, x, x))(x))
    assert "pallas_call" not in jaxpr


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 4, 2, 8), "float16", "Received: float16"),
        ((1, 4, 2, 1025), "float32", "at most 512"),
        ((0, 4, 2, 8), "float32", "known in advance"),
    ],
)
def test_errors(shape, dtype, message):
    x = jnp.ones(shape, dtype)
    with pytest.raises(ValueError, match=message):
        linear_attention(x, x, x, causal=True, implementation="pallas")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True, "chunk_size": 2}, "Received: chunk_size=2"),
        ({}, "needs causal=True. Received: causal=False"),
    ],
)
def test_what_the_kernel_does_not_take(options, message):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=message):
        linear_attention(x, x, x, implementation="pallas", **options)


def test_sizes_have_to_be_known():
    (length,) = jax.export.symbolic_shape("length")
    x = jax.ShapeDtypeStruct((1, length, 2, 8), "float32")

    def attend(x):
        return linear_attention(x, x, x, causal=True, implementation="pallas")

    with pytest.raises(ValueError, match="known in advance"):
        jax.export.export(jax.jit(attend))(x)


def test_float64_has_no_kernel():
    with jax.enable_x64(True):
        x = jnp.ones((1, 4, 2, 8), "float64")
        with pytest.raises(ValueError, match="Received: float64"):
            linear_attention(x, x, x, causal=True, implementation="pallas")


def test_a_state_goes_through_the_operation():
    check_pieces("pallas")
