"""Attention with a soft mask over distances: blocks, tokens and the definition."""

import numpy as np
import pytest

from keras_efficient_attn.ops import adaptive_span_attention, adaptive_span_state
from tests.autodiff import to_numpy
from tests.ops.pieces import (
    SIZES,
    TOLERANCE,
    draw_mask,
    masked_softmax,
    read_in_pieces,
)

RAMP = 5.5


def operands(length=150):
    random = np.random.default_rng(5)
    q, k, v = random.normal(size=(3, 2, length, 3, 4)).astype("float32")
    spans = random.uniform(-9, 30, (2, length, 3)).astype("float32")
    return q, k, v, spans


def definition(
    tensors, spans, mask, window, causal=True, include_self=True, position_key=None
):
    """The formula in float64; spans are per head, or per position."""
    query, key, _ = tensors
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    seen = (distance >= 0) | (not causal)
    distance = abs(distance)
    seen &= (distance < window) & (distance >= 1 - include_self)
    spans = np.broadcast_to(spans, query.shape[:3]).swapaxes(1, 2)[..., None]
    factor = np.clip((RAMP + spans.astype("float64") - distance) / RAMP, 0, 1)
    logits = 0.0
    if position_key is not None:
        rows = position_key[np.minimum(distance, window - 1)]
        logits = 0.5 * np.einsum("bthd,tsd->bhts", query, rows, dtype="float64")
    allowed = seen & mask[:, None, None]
    return masked_softmax(*tensors, allowed, 0.5, logits, factor)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_outputs_are_those_of_the_definition(causal, implementation):
    *tensors, spans = operands()
    mask = np.random.default_rng(6).random((2, 150)) > 0.3
    options = dict(window=33, position_key=tensors[1][0, :40, 0], causal=causal)
    for given in (spans, spans[0, 0]):
        output = adaptive_span_attention(
            *tensors,
            given,
            ramp=RAMP,
            key_mask=mask,
            implementation=implementation,
            **options,
        )
        correct = definition(tensors, given, mask, **options)
        np.testing.assert_allclose(to_numpy(output), correct, **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"ramp": 0}, "ramp=0"),
        ({"ramp": True}, "ramp=True"),
        ({"ramp": float("inf")}, "ramp=inf"),
        ({"spans": np.zeros((2, 3))}, r"spans\.shape=\(2, 3\)"),
        ({"spans": np.zeros((1, 2, 3))}, r"spans\.shape=\(1, 2, 3\)"),
        ({"spans": np.zeros((5, 9, 3))}, r"spans\.shape=\(5, 9, 3\)"),
        ({"position_key": np.zeros((7, 4))}, r"position_key\.shape=\(7, 4\), window=8"),
    ],
    ids=str,
)
def test_operands_that_do_not_fit(options, message):
    q, k, v, spans = operands(9)
    options = {"spans": spans, "window": 8, **options}
    with pytest.raises(ValueError, match=message):
        adaptive_span_attention(q, k, v, **options)


@pytest.mark.parametrize("sizes", SIZES)
# One window is never full; spans are per head, or per position.
@pytest.mark.parametrize(("window", "dynamic"), [(1, False), (7, True), (60, False)])
def test_tokens_and_segments_are_the_whole(window, dynamic, sizes):
    length = 23
    *tensors, spans = operands(length)
    mask = draw_mask(length)
    # A key that the mask hides is not read.
    tensors[1][~mask] = tensors[2][~mask] = np.nan
    if not dynamic:
        spans = np.broadcast_to(spans[:1, :1], spans.shape)
    position_key = np.random.default_rng(4).normal(size=(80, 4)).astype("float32")

    def attend(query, key, value, mask, spans, state):
        return adaptive_span_attention(
            query,
            key,
            value,
            spans if dynamic else spans[0, 0],
            window=window,
            ramp=RAMP,
            position_key=position_key,
            causal=True,
            key_mask=mask,
            state=state,
        )

    state = adaptive_span_state(2, 3, 4, 4, window=window)
    output, state = read_in_pieces(
        attend, state, (*tensors, mask, spans), SIZES[sizes](length)
    )
    clean = [np.nan_to_num(x) for x in tensors]
    correct = definition(clean, spans, mask, window, position_key=position_key)
    np.testing.assert_allclose(output, correct, **TOLERANCE)
    assert tuple(state["key"].shape) == (2, window - 1, 3, 4)


def test_a_state_of_another_window_goes_on():
    *tensors, spans = operands(12)

    def attend(window):
        return lambda query, key, value, state: adaptive_span_attention(
            query, key, value, spans[0, 0], window=window, causal=True, state=state
        )

    def read(windows):
        state = adaptive_span_state(2, 3, 4, 4, window=windows[0])
        for n, window in enumerate(windows):
            pieces = [x[:, n : n + 1] for x in tensors]
            output, state = attend(window)(*pieces, state)
        return to_numpy(output), state

    # Six keys, and of the last four the window of three sees its own.
    short, _ = read([6] * 11 + [3])
    always, _ = read([3] * 12)
    np.testing.assert_allclose(short, always, **TOLERANCE)
    _, grown = read([3] * 11 + [6])
    assert to_numpy(grown["mask"])[0].tolist() == [0, 0, 1, 1, 1]
