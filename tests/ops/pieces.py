"""Reads sequences in pieces through a state, and the reference softmax."""

import numpy as np

from tests.autodiff import to_numpy

TOLERANCE = dict(rtol=1e-4, atol=1e-5)
# One token at a time; segments; both alternately.
SIZES = {
    "tokens": lambda length: (1,) * length,
    "segments": lambda length: (4, length - 6, 2),
    "mixed": lambda length: (1, 3, 1, 1, length - 9, 1, 2),
}


def read_in_pieces(attend, state, tensors, sizes):
    """The outputs, joined, and the last state.

    Args:
        attend: Maps pieces of all tensors, and a state, to an output and a new state.
        state: The initial state.
        tensors: Arrays `(batch, length, ...)`.
        sizes: Lengths of the pieces.
    """
    outputs, start = [], 0
    for size in sizes:
        pieces = [x[:, start : start + size] for x in tensors]
        output, state = attend(*pieces, state)
        outputs.append(to_numpy(output))
        start += size
    assert start == tensors[0].shape[1]
    return np.concatenate(outputs, axis=1), state


def read_masked_pieces(attention, state, tensors, mask, sizes):
    """`read_in_pieces` of `attention`, causal, to the keys of a mask.

    Checks that the state keeps its shapes, and that it counts the positions.
    """
    shapes = {name: x.shape for name, x in state.items()}

    def attend(query, key, value, mask, state):
        return attention(query, key, value, causal=True, key_mask=mask, state=state)

    output, state = read_in_pieces(attend, state, (*tensors, mask), sizes)
    assert {name: x.shape for name, x in state.items()} == shapes
    assert to_numpy(state["position"]).tolist() == [mask.shape[1]] * len(mask)
    return output, state


def masked_softmax(query, key, value, allowed, scale, logits=0.0, factor=1.0):
    """Softmax attention in float64 by the formula; zeros without allowed keys.

    Args:
        query, key, value: `(batch, length, heads, dim)`.
        allowed: Boolean, broadcasts to `(batch, heads, queries, keys)`.
        scale: Factor of the dot products.
        logits: Added to the products.
        factor: Multiplies the weights before they are normalised.
    """
    weights = _weights(query, key, allowed, scale, logits, factor)
    return np.einsum("bhts,bshv->bthv", weights, value.astype("float64"))


def softmax_gradients(query, key, value, allowed, scale, weight):
    """Differentiates the sum of `weight * masked_softmax(...)` explicitly.

    Returns:
        Gradients of `query`, `key` and `value`, in float64.
    """
    query, key, value = (x.astype("float64") for x in (query, key, value))
    weights = _weights(query, key, allowed, scale)
    grad_weights = np.einsum("bthv,bshv->bhts", weight, value)
    mean = (weights * grad_weights).sum(-1, keepdims=True)
    grad_products = scale * weights * (grad_weights - mean)
    return (
        np.einsum("bhts,bshd->bthd", grad_products, key),
        np.einsum("bhts,bthd->bshd", grad_products, query),
        np.einsum("bhts,bthv->bshv", weights, weight),
    )


def _weights(query, key, allowed, scale, logits=0.0, factor=1.0):
    query, key = query.astype("float64"), key.astype("float64")
    products = scale * np.einsum("bthd,bshd->bhts", query, key) + logits
    weights = np.where(allowed, factor * np.exp(products), 0.0)
    totals = weights.sum(-1, keepdims=True)
    return weights / np.where(totals == 0, 1.0, totals)


def assert_gradients_are(received, expected):
    for ours, correct in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, correct, **TOLERANCE)


def draw_with_hidden_keys(heads_of, length):
    """`(query, key, value, mask)`; masked positions are NaN: they must not be read.

    Args:
        heads_of: Maps a length, a size of heads and a seed to an array.
        length: The length of all four.
    """
    tensors = heads_of(length), heads_of(length, seed=1), heads_of(length, 5)
    mask = draw_mask(length)
    tensors[1][~mask] = tensors[2][~mask] = np.nan
    return *tensors, mask


def draw_mask(length):
    """`(2, length)`; the first four keys are hidden from the first sequence."""
    mask = np.random.default_rng(3).random((2, length)) > 0.3
    mask[0, :4] = False
    return mask
