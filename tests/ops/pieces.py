"""Reads sequences in pieces through a state, and the reference softmax."""

import numpy as np
from keras import ops

from tests.autodiff import gradient_function, to_numpy

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


def check_masked_softmax(
    attend, tensors, allowed, weight, mask=None, scale=0.5, tolerance=TOLERANCE
):
    """Compares outputs and gradients with the formula; hidden keys are NaN.

    Args:
        attend: Maps query, key and value to an output.
        tensors: Query, key and value.
        allowed: As for `masked_softmax`, without `mask`.
        weight: Of the output in the sum that is differentiated.
        mask: Boolean `(batch, keys)`; hides keys of `attend`.
        scale: Of `attend`.
        tolerance: Relative and absolute, by name.
    """
    given = list(tensors)
    if mask is not None:
        allowed = allowed & mask[:, None, None]
        given[1:] = (np.where(mask[..., None, None], x, np.nan) for x in tensors[1:])

    def loss(query, key, value):
        return ops.sum(ops.multiply(attend(query, key, value), weight))

    received = [to_numpy(attend(*given)), *gradient_function(loss)(*given)]
    expected = [
        masked_softmax(*tensors, allowed, scale),
        *softmax_gradients(*tensors, allowed, scale, weight),
    ]
    for ours, correct in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, correct, **tolerance)
    if mask is not None:
        assert not any(gradient[~mask].any() for gradient in received[2:])


def heads_of(length, dim=4, heads=2, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(2, length, heads, dim)).astype("float32")


def draw_with_hidden_keys(length, heads=2):
    """`(query, key, value, mask)`; masked positions are NaN: they must not be read."""
    tensors = [heads_of(length, dim, heads, seed) for seed, dim in enumerate((4, 4, 5))]
    mask = draw_mask(length)
    tensors[1][~mask] = tensors[2][~mask] = np.nan
    return *tensors, mask


def draw_mask(length):
    """`(2, length)`; the first four keys are hidden from the first sequence."""
    mask = np.random.default_rng(3).random((2, length)) > 0.3
    mask[0, :4] = False
    return mask
