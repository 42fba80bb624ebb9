"""Attention with relative positions: tiles, one query, and the definition."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import relative_attention
from tests.autodiff import gradients, to_numpy
from tests.ops.pieces import TOLERANCE, masked_softmax

HEADS, DIM = 3, 4


def operands(length, keys, offset=0, causal=True, seed=0):
    """Inputs, position keys and biases, and the distances of the position keys."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape).astype("float32")

    last = 0 if causal else offset - keys + 1
    distances = np.arange(offset + length - 1, last - 1, -1)
    inputs = dict(
        query=normal(2, length, HEADS, DIM),
        key=normal(2, keys, HEADS, DIM),
        value=normal(2, keys, HEADS, 5),
        position_key=normal(len(distances), HEADS, DIM),
        content_bias=normal(HEADS, DIM),
        position_bias=normal(HEADS, DIM),
        key_mask=random.random((2, keys)) > 0.3,
    )
    return inputs, dict(zip(distances.tolist(), range(len(distances)), strict=True))


def dense(inputs, rows, offset=0, causal=True, window=None, documents=None):
    """The definition, pair by pair, in float64."""
    query, key, value, position_key, u, v, mask = inputs.values()
    length, keys = query.shape[1], key.shape[1]
    logits = np.zeros((2, HEADS, length, keys))
    allowed = np.zeros(logits.shape, bool)
    for i, j in np.ndindex(length, keys):
        distance = offset + i - j
        if (causal and distance < 0) or (window and abs(distance) >= window):
            continue
        allowed[:, :, i, j] = mask[:, j, None]
        if documents is not None:
            same = documents[0][:, i] == documents[1][:, j]
            allowed[:, :, i, j] &= same[:, None]
        place = position_key[rows[distance]].astype("float64")
        logits[:, :, i, j] = 0.5 * ((query[:, i] + v) * place).sum(-1)
    value = np.where(mask[..., None, None], value, 0.0)
    key = np.where(mask[..., None, None], key, 0.0)
    return masked_softmax(query + u, key, value, allowed, scale=0.5, logits=logits)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
@pytest.mark.parametrize(
    ("length", "keys", "options"),
    [
        (9, 9, dict(causal=True)),
        (9, 9, dict(causal=False, window=4)),
        (5, 8, dict(causal=False)),
        (4, 11, dict(causal=True, offset=7, window=5)),
        (150, 157, dict(causal=True, offset=7)),
    ],
    ids=str,
)
def test_it_is_the_double_loop(length, keys, options, implementation):
    known = {name: x for name, x in options.items() if name != "window"}
    inputs, rows = operands(length, keys, **known)
    # A key that the mask hides is not read.
    inputs["key"][~inputs["key_mask"]] = np.nan
    output = relative_attention(**inputs, **options, implementation=implementation)
    expected = dense(inputs, rows, **options)
    np.testing.assert_allclose(to_numpy(output), expected, **TOLERANCE)


@pytest.mark.parametrize("keys", [1, 12])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_one_query_behind_its_memory(keys, window):
    inputs, rows = operands(1, keys, offset=keys - 1)
    inputs["key"][~inputs["key_mask"]] = np.nan
    documents = np.ones((2, 1), "int32"), np.arange(2 * keys).reshape(2, keys) % 2
    options = dict(offset=keys - 1, window=window, causal=True)
    for given in (None, documents):
        output = relative_attention(**inputs, documents=given, **options)
        expected = dense(inputs, rows, documents=given, **options)
        np.testing.assert_allclose(to_numpy(output), expected, **TOLERANCE)


def test_one_query_has_the_gradients_of_the_definition():
    inputs, _ = operands(1, 6, offset=5)
    mask = inputs.pop("key_mask")

    def loss(implementation):
        def call(*values):
            given = dict(zip(inputs, values, strict=True), key_mask=mask)
            output = relative_attention(
                **given, offset=5, causal=True, implementation=implementation
            )
            return ops.sum(ops.square(output))

        return call

    received, expected = (
        gradients(loss(name), *inputs.values()) for name in ("blocks", "reference")
    )
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(offset=-1), "offset=-1"),
        (dict(offset=True), "offset=True"),
        (dict(offset=5), r"offset=5, key.shape=\(2, 4, 3, 4\)"),
        (dict(window=0), "window=0"),
        (dict(window=True), "window=True"),
        (dict(content_bias=np.zeros((4, 3))), r"content_bias.shape=\(4, 3\)"),
        (dict(position_bias=np.zeros(4)), r"position_bias.shape=\(4,\)"),
        (dict(position_key=np.zeros((9, 3, 4))), r"position_key.shape=\(9, 3, 4\)"),
        (dict(causal=False), r"= \(7, 3, 4\)"),
        (dict(documents=[np.ones((2, 4)), np.ones((2, 3))]), r"\[\(2, 4\), \(2, 3\)\]"),
        (dict(documents=np.ones((2, 4))), r"\[\(4,\), \(4,\)\]"),
        (dict(dropout=0.1), "dropout=0.1"),
        (dict(implementation="tiles"), "implementation='tiles'"),
        (dict(key_mask=np.ones((2, 5))), r"key_mask.shape=\(2, 5\)"),
    ],
    ids=str,
)
def test_errors_name_what_was_received(options, message):
    inputs, _ = operands(4, 4)
    with pytest.raises(ValueError, match=message):
        relative_attention(**{**inputs, "causal": True, **options})
