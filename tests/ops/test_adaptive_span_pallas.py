"""Attention with a span by the kernels for TPUs, interpreted by Pallas."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import adaptive_span_attention
from keras_efficient_attn.ops.common.plan import plan_for
from tests.autodiff import gradients, to_numpy
from tests.ops.test_adaptive_span import RAMP, definition, operands

if keras.backend.backend() != "jax":
    pytest.skip("Pallas is JAX's", allow_module_level=True)

import jax

from keras_efficient_attn.ops.adaptive_span import pallas


@pytest.fixture(autouse=True)
def tpu_with_small_blocks(monkeypatch):
    """Short sequences need several programs."""
    monkeypatch.setattr(pallas, "BLOCK", 32)
    with plan_for("tpu"):
        yield


CASES = [
    dict(window=70, causal=True, include_self=True, dynamic=True),
    dict(window=70, causal=False, include_self=False, dynamic=True),
    dict(window=33, causal=True, include_self=False, dynamic=False),
    dict(window=1, causal=False, include_self=True, dynamic=False),
    # Beyond the length.
    dict(window=200, causal=True, include_self=True, dynamic=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(case):
    options = dict(case)
    dynamic = options.pop("dynamic")
    q, k, v, spans = operands()
    mask = np.random.default_rng(6).random((2, 150)) > 0.3
    mask[0, :40] = False
    weight = np.random.default_rng(7).normal(size=v.shape).astype("float32")
    given = spans if dynamic else spans[0, 0]
    hidden = ~mask[..., None, None]
    poisoned = np.where(hidden, np.nan, k), np.where(hidden, np.nan, v)

    def loss(implementation):
        def of(*tensors):
            output = adaptive_span_attention(
                *tensors,
                ramp=RAMP,
                key_mask=mask,
                implementation=implementation,
                **options,
            )
            return ops.sum(ops.multiply(output, weight))

        return of

    output = adaptive_span_attention(
        q, *poisoned, given, ramp=RAMP, key_mask=mask, **options
    )
    correct = definition((q, k, v), given, mask, **options)
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)
    received = gradients(loss(None), q, *poisoned, given)
    expected = gradients(loss("reference"), q, k, v, given)
    for ours, theirs in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=5e-5)


@pytest.mark.parametrize("lengths", [(150, 90), (90, 150)], ids=str)
def test_lengths_may_differ(lengths):
    q, k, v, spans = operands()
    q, spans = (x[:, : lengths[0]] for x in (q, spans))
    k, v = (x[:, : lengths[1]] for x in (k, v))
    options = dict(window=70, causal=True)
    output = adaptive_span_attention(q, k, v, spans, ramp=RAMP, **options)
    mask = np.ones(k.shape[:2], bool)
    correct = definition((q, k, v), spans, mask, **options)
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_added_up_in_float32():
    *tensors, spans = operands()
    half = [ops.cast(x, "bfloat16") for x in tensors]
    options = dict(window=70, causal=True)
    output = adaptive_span_attention(*half, spans, ramp=RAMP, **options)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    wide = [to_numpy(ops.cast(x, "float32")) for x in half]
    mask = np.ones((2, 150), bool)
    correct = definition(wide, spans, mask, **options)
    output = to_numpy(ops.cast(output, "float32"))
    np.testing.assert_allclose(output, correct, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("options", "takes_kernel"),
    [
        (dict(window=70), True),
        (dict(window=70, implementation="blocks"), False),
        # The keys of more blocks than a program holds.
        (dict(window=32 * 9), False),
    ],
    ids=str,
)
def test_the_calls_that_take_the_kernel(options, takes_kernel):
    q, k, v, spans = operands(400)

    def attend(q):
        return adaptive_span_attention(q, k, v, spans, causal=True, **options)

    assert ("span_forward" in str(jax.make_jaxpr(attend)(q))) == takes_kernel
