"""A state of another call raises an error instead of being misread."""

import numpy as np
import pytest

from keras_efficient_attn import ops

X = np.ones((2, 4, 3, 8), "float32")
SIZES = (2, 3, 8, 8)
CODES = np.ones((3, 5, 8), "float32")


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


@pytest.mark.parametrize("case", CASES)
def test_a_state_of_another_call_is_refused(case):
    call, state = CASES[case]
    with pytest.raises(ValueError, match="`state` must come from calls"):
        call(state)
