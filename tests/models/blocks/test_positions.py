"""Learned positions: a table, or one for each coordinate."""

import numpy as np
import pytest

from keras_efficient_attn.models import (
    AxialPositions,
    EfficientCausalLM,
    EfficientTransformerBackbone,
    LearnedPositions,
)
from tests.autodiff import to_numpy
from tests.models.tasks.test_causal_lm import generate, greedy
from tests.ops.pieces import read_in_pieces

WIDTH = 6


def built(shape, widths=None, **options):
    layer = AxialPositions(shape, widths, **options)
    layer.build((None, None, WIDTH))
    for i, table in enumerate(layer.tables):
        table.assign(np.random.default_rng(i).normal(size=table.shape))
    return layer


@pytest.mark.parametrize(
    ("shape", "widths"),
    [((3, 4), None), ((2, 3, 2), None), ((3, 4), (2, 4)), ((2, 3, 2), (1, 2, 3))],
    ids=str,
)
def test_vectors_are_those_of_the_coordinates(shape, widths):
    layer = built(shape, widths)
    tables = [to_numpy(table) for table in layer.tables]
    length = int(np.prod(shape)) - 1
    x = np.random.default_rng(9).normal(size=(2, length, WIDTH)).astype("float32")
    rows = []
    for t in range(length):
        parts = [
            table[i]
            for table, i in zip(tables, np.unravel_index(t, shape), strict=True)
        ]
        rows.append(np.sum(parts, axis=0) if widths is None else np.concatenate(parts))
    expected = x + np.stack(rows)
    np.testing.assert_allclose(to_numpy(layer(x)), expected, rtol=1e-5, atol=1e-6)
    received, _ = read_in_pieces(
        lambda x, state: layer(x, state=state),
        layer.get_initial_state(2),
        [x],
        sizes=(4, 1, length - 5),
    )
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_offsets_stay_within_the_grid():
    layer = built((3, 4), max_offset=50, seed=0)
    x = np.zeros((1, 10, WIDTH), "float32")
    whole = to_numpy(layer(np.zeros((1, 12, WIDTH), "float32")))[0]
    starts = set()
    for _ in range(20):
        found = to_numpy(layer(x, training=True))[0]
        (start,) = (
            i for i in range(3) if np.allclose(found, whole[i : i + 10], rtol=1e-6)
        )
        starts.add(start)
    assert max(starts) == 2


@pytest.mark.parametrize("make", [lambda: built((3, 4)), lambda: LearnedPositions(12)])
def test_positions_beyond_the_table_are_nan(make, backend):
    layer = make()
    x = np.zeros((2, 8, WIDTH), "float32")
    first, state = layer(x, state=layer.get_initial_state(2))
    second, state = layer(x, state=state)
    first, second = to_numpy(first), to_numpy(second)
    whole = to_numpy(layer(np.zeros((2, 12, WIDTH), "float32")))
    np.testing.assert_allclose(first, whole[:, :8], rtol=1e-6)
    np.testing.assert_allclose(second[:, :4], whole[:, 8:], rtol=1e-6)
    assert np.isnan(second[:, 4:]).all()
    if backend == "tensorflow":
        # A graph for any length cannot refuse a longer one.
        import tensorflow as tf

        signature = [tf.TensorSpec((None, None, WIDTH))]
        graph = tf.function(lambda x: layer(x), input_signature=signature)
        longer = to_numpy(graph(np.zeros((1, 14, WIDTH), "float32")))
        np.testing.assert_allclose(longer[:, :12], whole[:1], rtol=1e-6)
        assert np.isnan(longer[:, 12:]).all()


def test_a_backbone_streams_with_them():
    backbone = EfficientTransformerBackbone(
        11, 1, 2, 8, 16, positions={"kind": "axial", "shape": (3, 4), "widths": (3, 5)}
    )
    assert backbone.max_sequence_length == 12
    tokens = np.arange(12)[None] % 11
    whole = backbone({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    state = backbone.get_initial_state(1, max_length=12)
    received, _ = read_in_pieces(backbone.stream, state, [tokens], (5, 7))
    np.testing.assert_allclose(received, to_numpy(whole), rtol=1e-4, atol=1e-5)
    again = EfficientTransformerBackbone.from_config(backbone.get_config())
    assert again.count_params() == backbone.count_params()


@pytest.mark.parametrize(
    "positions",
    [dict(kind="learned", max_length=10), dict(kind="axial", shape=(2, 5))],
    ids=lambda options: options["kind"],
)
def test_generation_to_the_last_position(positions):
    """Prompts are read in segments that end with padding."""
    model = EfficientCausalLM(
        EfficientTransformerBackbone(11, 1, 2, 8, 16, positions=positions)
    )
    model.compile(sampler="greedy")
    prompt = np.array([[3, 1, 4] + [0] * 7])
    inputs = {"token_ids": prompt, "padding_mask": (prompt > 0).astype("int32")}
    found = generate(model, inputs)["token_ids"]
    np.testing.assert_array_equal(found, greedy(model, inputs))


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="axial"), "shape=None"),
        (dict(kind="axial", shape=(4,)), r"shape=\(4,\)"),
        (dict(kind="axial", shape=(4, 0)), "shape=0"),
        (dict(kind="axial", shape=(4, 2), widths=(1, 2, 3)), r"widths=\(1, 2, 3\)"),
        (dict(kind="axial", shape=(4, 2), widths=(1, 2)), r"widths=\(1, 2\), width 8"),
        (dict(kind="rotary", shape=(4, 2)), "kind='rotary'"),
    ],
)
def test_positions_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EfficientTransformerBackbone(11, 1, 2, 8, 16, positions=options)


@pytest.mark.any_backend
def test_longer_inputs_are_refused():
    with pytest.raises(ValueError, match="length 13"):
        built((3, 4))(np.zeros((1, 13, WIDTH), "float32"))
