"""A state of another call raises an error instead of being misread."""

import numpy as np
import pytest

from keras_efficient_attn import ops
from tests.autodiff import to_numpy

X = np.ones((2, 4, 3, 8), "float32")
SIZES = (2, 3, 8, 8)
CODES = np.ones((3, 5, 8), "float32")
GRID = dict(query_block=(2, 2), grid=(4, 4))
FIXED = dict(pattern="fixed", stride=3)


def attend_hashed(state):
    buckets = np.zeros((2, 3, 1, 4), "int32")
    options = dict(num_buckets=2, chunk_size=2, causal=True, aligned=True)
    return ops.lsh_attention(X, X, buckets, state=state, **options)


CASES = {
    "local": (
        lambda state: ops.local_attention(X, X, X, window=3, causal=True, state=state),
        ops.local_attention_state(*SIZES, window=4),
    ),
    "local, of other heads": (
        lambda state: ops.local_attention(X, X, X, window=3, causal=True, state=state),
        ops.local_attention_state(2, 1, 8, 8, window=3),
    ),
    "sparse, of another stride": (
        lambda state: ops.sparse_attention(X, X, X, stride=3, causal=True, state=state),
        ops.sparse_attention_state(*SIZES, 12, stride=2),
    ),
    "sparse, of other heads": (
        lambda state: ops.sparse_attention(
            X, X, X, stride=3, factors=1, causal=True, state=state
        ),
        ops.sparse_attention_state(*SIZES, 12, stride=3, factors=0),
    ),
    "sparse, of another pattern": (
        lambda state: ops.sparse_attention(
            X, X, X, pattern="fixed", stride=3, causal=True, state=state
        ),
        ops.sparse_attention_state(*SIZES, 12, stride=3),
    ),
    "span, of other heads": (
        lambda state: ops.adaptive_span_attention(
            X, X, X, np.ones(3, "float32"), window=3, causal=True, state=state
        ),
        ops.adaptive_span_state(2, 1, 8, 8, window=3),
    ),
    "linear, of other features": (
        lambda state: ops.linear_attention(X, X, X, causal=True, state=state),
        ops.linear_attention_state(2, 3, 7, 8),
    ),
    "codes, of another window": (
        lambda state: ops.vq_attention(
            X, X, X, CODES, window=2, causal=True, state=state
        ),
        ops.vq_attention_state(2, 3, 5, 8, 8, window=3),
    ),
    "codes, of no window": (
        lambda state: ops.vq_attention(X, X, X, CODES, causal=True, state=state),
        ops.vq_attention_state(2, 3, 5, 8, 8, window=3),
    ),
    "hashed, of other buckets": (
        attend_hashed,
        ops.lsh_attention_state(2, 3, 1, 3, 2, 8, 8),
    ),
}


SPANS = np.ones(3, "float32")
# A call with a state, and the state's maker: of the batch size.
STREAMS = {
    "local": (
        lambda x, state: ops.local_attention(x, x, x, window=3, **state),
        lambda rows: ops.local_attention_state(rows, *SIZES[1:], window=3),
    ),
    "local, in a grid": (
        lambda x, state: ops.local_attention(x, x, x, **GRID, **state),
        lambda rows: ops.local_attention_state(rows, *SIZES[1:], **GRID),
    ),
    "strided": (
        lambda x, state: ops.sparse_attention(x, x, x, stride=3, **state),
        lambda rows: ops.sparse_attention_state(rows, *SIZES[1:], 12, stride=3),
    ),
    "fixed": (
        lambda x, state: ops.sparse_attention(x, x, x, **FIXED, **state),
        lambda rows: ops.sparse_attention_state(rows, *SIZES[1:], 12, **FIXED),
    ),
    "span": (
        lambda x, state: ops.adaptive_span_attention(x, x, x, SPANS, window=3, **state),
        lambda rows: ops.adaptive_span_state(rows, *SIZES[1:], window=3),
    ),
    "linear": (
        lambda x, state: ops.linear_attention(x, x, x, **state),
        lambda rows: ops.linear_attention_state(rows, *SIZES[1:]),
    ),
    "gated": (
        lambda x, state: ops.linear_attention(
            x, x, x, log_decay=np.zeros(x.shape[:3], "float32"), **state
        ),
        lambda rows: ops.linear_attention_state(rows, *SIZES[1:]),
    ),
    "codes": (
        lambda x, state: ops.vq_attention(x, x, x, CODES, **state),
        lambda rows: ops.vq_attention_state(rows, 3, 5, 8, 8),
    ),
    "codes, with a window": (
        lambda x, state: ops.vq_attention(x, x, x, CODES, window=2, **state),
        lambda rows: ops.vq_attention_state(rows, 3, 5, 8, 8, window=2),
    ),
    "hashed": (
        lambda x, state: ops.lsh_attention(
            x,
            x,
            np.zeros((len(x), 3, 1, x.shape[1]), "int32"),
            num_buckets=2,
            chunk_size=2,
            aligned=True,
            **state,
        ),
        lambda rows: ops.lsh_attention_state(rows, 3, 1, 2, 2, 8, 8),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.any_backend
def test_a_state_of_other_rows_is_refused(name):
    call, make = STREAMS[name]
    for rows, others in ((1, 3), (3, 1)):
        with pytest.raises(ValueError, match="`state` must come from calls"):
            call(X[:1].repeat(rows, 0), dict(causal=True, state=make(others)))


@pytest.mark.parametrize("name", STREAMS)
def test_an_empty_segment_changes_nothing(name):
    call, make = STREAMS[name]
    _, state = call(X, dict(causal=True, state=make(2)))
    output, new = call(X[:, :0], dict(causal=True, state=state))
    assert tuple(output.shape) == (2, 0, 3, 8)
    assert new.keys() == state.keys()
    for key, tensor in state.items():
        np.testing.assert_array_equal(to_numpy(new[key]), to_numpy(tensor))


@pytest.mark.parametrize("case", CASES)
def test_a_state_of_another_call_is_refused(case):
    call, state = CASES[case]
    with pytest.raises(ValueError, match="`state` must come from calls"):
        call(state)
