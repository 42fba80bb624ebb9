"""Random calls of every layer under contract: no crash, no NaN, and the right output.

`FUZZ_EXAMPLES` is the number of calls, and `FUZZ_SEED` selects others; `make fuzz` runs
ten thousand per backend.
"""

import dataclasses
import os
import re
from collections import Counter
from types import SimpleNamespace

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

from keras_efficient_attn import LinearAttention, ReformerLSHAttention
from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.layers.attention.registry import attention_class
from tests.autodiff import gradients, to_numpy
from tests.contract.cases import CASES, DIM

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 60))
SEED = os.environ.get("FUZZ_SEED")
# Few lengths, because JAX compiles each: zero, one, odd, several chunks.
LENGTHS = (0, 1, 5, 8)
# Batches without rows are for JAX and PyTorch: docs/limits.md.
EMPTY_BATCHES = keras.backend.backend() != "tensorflow"
BATCHES = (0, 1, 2, 2) if EMPTY_BATCHES else (1, 2)
TOLERANCES = {
    "float32": dict(rtol=1e-3, atol=1e-4),
    "float64": dict(rtol=1e-3, atol=1e-4),
}
# Refusals that docs/limits.md lists; any other error is a finding.
SAME_LENGTH = r"`query` and `key` must have the same length for a `window`\. Received: "
SAME_VECTORS = (
    r"`query` and `value` must have the same length: queries and keys are the "
)
SAME_HEADS = (
    r"Queries and keys are the same vectors, and have the same heads\. Received: "
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer; `seed` draws its numbers."""

    case: object
    batch: int
    length: int
    key_length: int
    causal: bool
    query_mask: bool
    key_mask: bool
    dtype: str
    shared_heads: int | None
    value_dim: int | None
    gradient: bool
    seed: int

    def __repr__(self):
        fields = {**vars(self), "case": self.case.name}
        return f"Call({fields})"


@st.composite
def calls(draw):
    case = draw(st.sampled_from(CASES))
    length = draw(st.sampled_from(LENGTHS))
    return Call(
        case=case,
        batch=draw(st.sampled_from(BATCHES)),
        length=length,
        key_length=draw(st.sampled_from((length, length, *LENGTHS))),
        causal=draw(st.sampled_from(case.causal)),
        query_mask=draw(st.booleans()),
        key_mask=draw(st.booleans()),
        dtype=draw(st.sampled_from(("float32", "mixed_bfloat16", "float64"))),
        shared_heads=draw(st.sampled_from((None, None, 1))),
        value_dim=draw(st.sampled_from((None, 3))),
        gradient=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


def make_tensors(call):
    """Query, value, and masks with holes; masked positions are NaN."""
    rng = np.random.default_rng(call.seed)
    dtype = "float64" if call.dtype == "float64" else "float32"
    tensors, masks = [], []
    lengths = (call.length, call.query_mask), (call.key_length, call.key_mask)
    for length, masked in lengths:
        x = rng.normal(size=(call.batch, length, DIM)).astype(dtype)
        mask = rng.random((call.batch, length)) < 0.7 if masked else None
        if masked:
            x[~mask] = np.nan
        tensors.append(x)
        masks.append(mask)
    return tensors, masks


def refusal(call):
    """The text of the error for a call that the layer refuses, or `None`."""
    cross = call.length != call.key_length
    if call.case.layer is ReformerLSHAttention:
        if call.shared_heads is not None:
            return SAME_HEADS
        return SAME_VECTORS if cross else None
    windowed = issubclass(call.case.layer, LinearAttention)
    if windowed and call.case.options.get("window") and cross:
        return SAME_LENGTH
    return None


def check(call):
    """Raises for a finding; returns the message of a rejected call."""
    options = {"dtype": call.dtype}
    if call.value_dim is not None:
        options["value_dim"] = call.value_dim
    if call.shared_heads is not None:
        options["num_key_value_heads"] = call.shared_heads
    (query, value), (query_mask, key_mask) = make_tensors(call)
    masks = dict(query_mask=query_mask, key_mask=key_mask)
    try:
        layer = call.case.make(**options)
        layer.build((None, None, DIM), (None, None, DIM))
        output = layer(query, value, use_causal_mask=call.causal, **masks)
    except (ValueError, TypeError) as error:
        reason = refusal(call)
        if reason is not None and re.search(reason, str(error)):
            return str(error)
        raise
    assert refusal(call) is None
    assert tuple(output.shape) == query.shape
    received = to_numpy(ops.cast(output, "float32"))
    assert np.isfinite(received).all()
    if call.gradient and call.dtype == "float32" and query.size and value.size:

        def loss(query, value):
            output = layer(query, value, use_causal_mask=call.causal, **masks)
            return ops.sum(output * output)

        for gradient in gradients(loss, query, value):
            assert np.isfinite(gradient).all()
    streams = call.causal and call.key_mask and call.dtype == "float32"
    if streams and call.case.smooth:
        check_stream(call, layer, (value, key_mask))
    # The oracles do not support projections that heads share.
    if call.dtype in TOLERANCES and call.case.smooth and not call.shared_heads:
        if key_mask is None:
            key_mask = np.ones(value.shape[:2], bool)
        if value.size and query.size:
            masks = dict(query_mask=query_mask, key_mask=key_mask)
            expected, _ = call.case.oracle(
                layer, query, value, causal=call.causal, **masks
            )
            np.testing.assert_allclose(received, expected, **TOLERANCES[call.dtype])
    return None


def check_stream(call, layer, inputs):
    """Two segments, one possibly empty, give the outputs of one call."""
    x, mask = inputs
    if layer.state_spec(1, 8) is None:
        return
    options = dict(use_causal_mask=True)
    # Masked queries are NaN as well.
    whole = to_numpy(layer(x, x, query_mask=mask, key_mask=mask, **options))
    state = call.case.get_initial_state(layer, call.batch)
    outputs, cut = [], call.seed * call.length // 3
    for part in (slice(None, cut), slice(cut, None)):
        masks = dict(query_mask=mask[:, part], key_mask=mask[:, part])
        output, state = layer(x[:, part], x[:, part], state=state, **masks, **options)
        outputs.append(to_numpy(output))
    parts = np.concatenate(outputs, axis=1)
    np.testing.assert_allclose(parts, whole, rtol=1e-3, atol=1e-4)


def test_the_table_has_every_registered_layer():
    layers = {case.layer for case in CASES}
    assert {attention_class(name) for name in attention_names()} <= layers


def test_random_calls():
    refused = Counter()

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        # Shrinking a finding needs many more compilations.
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(calls())
    def run(call):
        refused[check(call) is not None] += 1

    if SEED is not None:
        run = hypothesis.seed(int(SEED))(run)
    run()
    # A strategy with only rejected calls would find nothing.
    assert refused[True] < refused[False]


@pytest.mark.skipif(not EMPTY_BATCHES, reason="docs/limits.md")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_without_rows(case):
    call = Call(case, 0, 8, 8, case.usual, True, True, "float32", None, None, False, 0)
    assert check(call) is None


def test_another_error_than_the_documented_one_is_a_finding():
    (case,) = (case for case in CASES if case.name == "reformer")
    call = Call(case, 1, 5, 5, case.usual, False, False, "float32", 1, None, False, 0)
    assert "num_key_value_heads=1" in check(call)

    def make(**options):
        raise ValueError("`key` is not what it should be, nor is `num_key_value_heads`")

    broken = SimpleNamespace(**{**vars(case), "make": make})
    with pytest.raises(ValueError, match="not what it should be"):
        check(dataclasses.replace(call, case=broken))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sequences_of_length_0(case):
    call = Call(case, 2, 0, 0, case.usual, True, True, "float32", None, None, False, 0)
    assert check(call) is None
