"""Attention over quantised keys by the kernels for TPUs, interpreted by Pallas."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import vq_attention
from keras_efficient_attn.ops.common.plan import plan_for
from tests.autodiff import gradients, to_numpy
from tests.ops.test_vq_attention import (
    WINDOWS,
    check_code_without_keys,
    definition,
    draw,
)

if keras.backend.backend() != "jax":
    pytest.skip("Pallas is JAX's", allow_module_level=True)

import jax

# Several chunks of the kernels.
LENGTH = 150
CASES = [("no-window", True), ("exact", True), ("exact", False), ("quantised", True)]


@pytest.fixture(autouse=True)
def tpu():
    with plan_for("tpu"):
        yield


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_outputs_and_gradients_are_those_of_the_definition(name, causal):
    options = dict(causal=causal, **WINDOWS[name])
    query, key, value, codes, mask = draw(LENGTH)
    weight = np.random.default_rng(1).normal(size=value.shape).astype("float32")
    options["key_mask"] = mask
    hidden = ~mask[..., None, None]
    poisoned = np.where(hidden, np.nan, key), np.where(hidden, np.nan, value)

    def loss(how):
        def of(query, key, value):
            output = vq_attention(query, key, value, codes, **how, **options)
            return ops.sum(ops.multiply(output, weight))

        return of

    output = vq_attention(query, *poisoned, codes, **options)
    correct = definition(query, key, value, codes, mask, causal, **WINDOWS[name])
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)
    reference = loss(dict(implementation="reference"))
    received = gradients(loss({}), query, *poisoned)
    expected = gradients(reference, query, key, value)
    for ours, theirs in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=5e-5)


KERNELS = ["linear_attention_forward", "splash_mha_fwd"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(causal=True), KERNELS[:1]),
        (dict(causal=True, window=5), KERNELS),
        (dict(causal=True, window=5, implementation="chunked"), []),
        (dict(causal=True, window=5, block_length=8), []),
        (dict(causal=True, order=2), []),
    ],
    ids=str,
)
def test_the_kernels_of_a_call(options, expected):
    query, key, value, codes, _ = draw(LENGTH)
    program = jax.make_jaxpr(
        lambda query: vq_attention(query, key, value, codes, **options)
    )(query)
    assert [name for name in KERNELS if name in str(program)] == expected


def test_more_codes_than_the_kernel_holds_take_the_scan():
    query, key, value, _, mask = draw(30)
    codes = np.random.default_rng(2).normal(size=(2, 513, 4)).astype("float32")
    output = vq_attention(query, key, value, codes, key_mask=mask, causal=True)
    correct = definition(query, key, value, codes, mask, True)
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


def test_a_code_without_keys_sets_no_scale():
    check_code_without_keys()


def test_bfloat16_is_added_up_in_float32():
    query, key, value, codes, mask = draw(LENGTH)
    options = dict(key_mask=mask, causal=True, window=5)
    half = [ops.cast(x, "bfloat16") for x in (query, key, value)]
    output = vq_attention(*half, codes, **options)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    wide = [to_numpy(ops.cast(x, "float32")) for x in half]
    correct = definition(*wide, codes, mask, True, window=5)
    np.testing.assert_allclose(
        to_numpy(ops.cast(output, "float32")), correct, rtol=0.03, atol=0.03
    )


def test_gradients_through_the_cache_can_be_stopped():
    query, key, value, codes, _ = draw(LENGTH)
    options = dict(causal=True, gradient_through_cache=False)

    def loss(query, value):
        output = vq_attention(query, key, value, codes, **options)
        return ops.sum(ops.square(output))

    grad_query, grad_value = gradients(loss, query, value)
    assert np.abs(grad_query).max() > 0.01
    assert np.all(grad_value == 0)
