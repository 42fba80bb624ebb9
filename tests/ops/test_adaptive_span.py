"""Attention with a soft mask over distances: blocks, tokens and the definition."""

import numpy as np
import pytest

from keras_efficient_attn.ops import adaptive_span_attention, adaptive_span_state
from tests.autodiff import to_numpy
from tests.ops.pieces import SIZES, TOLERANCE, masked_softmax, read_in_pieces


def operands(length=150):
    random = np.random.default_rng(5)
    q, k, v = random.normal(size=(3, 2, length, 3, 4)).astype("float32")
    spans = random.uniform(-9, 30, (2, length, 3)).astype("float32")
    return q, k, v, spans


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_the_quadratic_definition(causal):
    q, k, v, spans = operands()
    options = dict(
        window=33,
        ramp=5.5,
        position_key=k[0, :40, 0],
        causal=causal,
        key_mask=np.random.default_rng(6).random((2, 150)) > 0.3,
    )
    for given in (spans, spans[0, 0]):
        definition, blocks = (
            to_numpy(
                adaptive_span_attention(
                    q, k, v, given, implementation=implementation, **options
                )
            )
            for implementation in ("reference", "blocks")
        )
        np.testing.assert_allclose(blocks, definition, rtol=1e-4, atol=1e-5)


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
    length, ramp = 23, 5.5
    *tensors, spans = operands(length)
    mask = np.random.default_rng(3).random((2, length)) > 0.3
    mask[0, :4] = False
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
            ramp=ramp,
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
    distance = np.arange(length)[:, None] - np.arange(length)
    near = (distance >= 0) & (distance < window)
    factor = (ramp + spans.transpose(0, 2, 1)[..., None] - distance) / ramp
    rows = position_key.astype("float64")[np.maximum(distance, 0)]
    expected = masked_softmax(
        *clean,
        near & mask[:, None, None],
        scale=0.5,
        logits=0.5 * np.einsum("bthd,tsd->bhts", clean[0], rows),
        factor=np.clip(factor, 0, 1),
    )
    np.testing.assert_allclose(output, expected, **TOLERANCE)
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
