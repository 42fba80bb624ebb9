"""Sequences read in pieces through a state, and the softmax that they are held to."""

import numpy as np

from tests.autodiff import to_numpy

TOLERANCE = dict(rtol=1e-4, atol=1e-5)
# A token at a time; segments; both, in turns.
SIZES = {
    "tokens": lambda length: (1,) * length,
    "segments": lambda length: (4, length - 6, 2),
    "mixed": lambda length: (1, 3, 1, 1, length - 9, 1, 2),
}


def read_in_pieces(attend, state, tensors, sizes):
    """The outputs, joined, and the last state.

    Args:
        attend: Maps pieces of all tensors, and a state, to an output and a new state.
        state: The first one.
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


def masked_softmax(query, key, value, allowed, scale, logits=0.0, factor=1.0):
    """In float64, from the formula; zeros where `allowed` has no key.

    Args:
        query, key, value: `(batch, length, heads, dim)`.
        allowed: Boolean, broadcasts to `(batch, heads, queries, keys)`.
        scale: Factor of the dot products.
        logits: Added to them.
        factor: Multiplies the weights before they are normalised.
    """
    query, key, value = (x.astype("float64") for x in (query, key, value))
    products = scale * np.einsum("bthd,bshd->bhts", query, key) + logits
    weights = np.where(allowed, factor * np.exp(products), 0.0)
    totals = weights.sum(-1, keepdims=True)
    weights = weights / np.where(totals == 0, 1.0, totals)
    return np.einsum("bhts,bshv->bthv", weights, value)
