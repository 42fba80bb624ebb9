"""`ops.linear_attention` with `log_decay` and `beta`."""

import functools

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.ops import linear_attention, linear_attention_state
from keras_efficient_attn.ops.common.feature_kernels.choice import features_config
from keras_efficient_attn.ops.linear_attention.gated.api import (
    gated_attention_with_feature_maps,
)
from tests.autodiff import assert_slope, gradient_function, gradients, to_numpy
from tests.ops.linear_attention_cases import weighed_sum
from tests.ops.pieces import SIZES, TOLERANCE, draw_mask, read_in_pieces

# Which of the two arguments a rule has, and whether decays differ by feature.
RULES = {
    "decay": ("scalar", False),
    "decay-by-feature": ("vector", False),
    "delta": (None, True),
    "decay-delta": ("scalar", True),
    "decay-by-feature-delta": ("vector", True),
}
BATCH, LENGTH, HEADS, FEATURES, VALUE_DIM = 2, 37, 2, 5, 3


@pytest.fixture(params=RULES.values(), ids=RULES.keys())
def rule(request):
    return request.param


def draw(rule=("vector", True), length=LENGTH, strength=1.0, seed=0):
    """`[query, key, value, log_decay, beta]`, positive except values, unit keys."""
    decays, corrects = rule
    random = np.random.default_rng(seed)
    shape = (BATCH, length, HEADS)
    query, key = random.gamma(1.0, size=(2, *shape, FEATURES))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(*shape, VALUE_DIM))
    log_decay = -strength * random.gamma(1.0, size=(*shape, FEATURES))
    if decays != "vector":
        log_decay = log_decay[..., 0] if decays else None
    beta = random.uniform(0, 2, size=shape) if corrects else None
    tensors = (query, key, value, log_decay, beta)
    return [x if x is None else x.astype("float32") for x in tensors]


def recurrence(query, key, value, log_decay, beta, mask=None, normalize=False):
    """`(output, state)` in float64, position by position."""
    tensors = (query, key, value, log_decay, beta)
    query, key, value, log_decay, beta = (
        x if x is None else np.asarray(x, "float64") for x in tensors
    )
    ones = np.ones((*value.shape[:3], int(normalize)))
    value = np.concatenate([value, ones], axis=-1)
    batch, length, heads, features = query.shape
    state = np.zeros((batch, heads, features, value.shape[-1]))
    output = np.zeros((batch, length, heads, value.shape[-1]))
    for b, t, h in np.ndindex(batch, length, heads):
        memory = state[b, h]
        if t < key.shape[1] and (mask is None or mask[b, t]):
            if log_decay is not None:
                memory = np.exp(log_decay[b, t, h]).reshape(-1, 1) * memory
            new = value[b, t, h]
            if beta is not None:
                new = beta[b, t, h] * (new - key[b, t, h] @ memory)
            state[b, h] = memory = memory + np.outer(key[b, t, h], new)
        output[b, t, h] = query[b, t, h] @ memory
    if normalize:
        total = output[..., -1:]
        output = output[..., :-1] / np.where(total == 0, 1, total)
    return output, state


def attend(query, key, value, log_decay, beta, **options):
    options = {"normalize": False, **options}
    rates = dict(log_decay=log_decay, beta=beta)
    return linear_attention(query, key, value, causal=True, **rates, **options)


def poison(tensors, mask):
    """Keys, values and rates with NaN where the mask hides them."""
    hidden = [
        x
        if x is None
        else np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, np.nan)
        for x in tensors[1:]
    ]
    return [tensors[0], *hidden]


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_outputs_are_those_of_the_recurrence(rule, implementation):
    tensors, mask = draw(rule), draw_mask(LENGTH)
    correct, _ = recurrence(*tensors, mask)
    options = dict(key_mask=mask, chunk_size=20, implementation=implementation)
    received = attend(*poison(tensors, mask), **options)
    np.testing.assert_allclose(to_numpy(received), correct, **TOLERANCE)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("rule", [("scalar", False), ("vector", False)], ids=str)
def test_normalized_outputs(rule, implementation):
    tensors, mask = draw(rule), draw_mask(LENGTH)
    correct, _ = recurrence(*tensors, mask, normalize=True)
    options = dict(key_mask=mask, chunk_size=20, normalize=True)
    received = attend(*tensors, implementation=implementation, **options)
    np.testing.assert_allclose(to_numpy(received), correct, **TOLERANCE)


def test_gradients_are_the_slopes_of_the_recurrence(rule):
    tensors, mask = draw(rule), draw_mask(LENGTH)
    cotangent = np.random.default_rng(5).normal(size=tensors[2].shape)
    given = [x for x in tensors if x is not None]

    def restore(arrays):
        rest = iter(arrays)
        return [x if x is None else next(rest) for x in tensors]

    def loss(*arrays):
        output = attend(*restore(arrays), key_mask=mask, chunk_size=8)
        return ops.sum(ops.multiply(output, cotangent.astype("float32")))

    def exact_loss(*arrays):
        return (recurrence(*restore(arrays), mask)[0] * cotangent).sum()

    for i, gradient in enumerate(gradients(loss, *poison(given, mask))):
        assert_slope(gradient, exact_loss, given, i)
        if i:
            assert np.all(gradient[~mask] == 0)


@pytest.mark.parametrize("normalize", [False, True], ids=["sum", "normalized"])
def test_gradients_equal_those_of_the_reference(normalize):
    # Without corrections, because their normalizers may be near zero.
    tensors = draw(("vector", False))[:4]

    def gradient(implementation):
        options = dict(implementation=implementation, normalize=normalize)

        def loss(*arrays):
            return weighed_sum([attend(*arrays, None, chunk_size=20, **options)])

        return gradients(loss, *tensors)

    for ours, theirs in zip(gradient("chunked"), gradient("reference"), strict=True):
        limit = 1e-4 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=limit)


def test_gradients_of_compiled_decays_by_feature():
    """XLA's program for CPUs once crashed at 8 features and 32 positions."""
    query, key, value, log_decay, _ = draw(("vector", False), length=32)
    query, key, log_decay = (
        np.concatenate([x, x[..., :3]], axis=-1) for x in (query, key, log_decay)
    )
    tensors = query, key, value, log_decay

    def gradient(implementation):
        def loss(*arrays):
            output = attend(*arrays, None, implementation=implementation)
            return ops.sum(ops.square(output))

        return gradients(loss, *tensors, xla=True)

    for ours, theirs in zip(gradient("chunked"), gradient("reference"), strict=True):
        limit = 1e-4 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=limit)


@pytest.mark.parametrize("normalize", [False, True], ids=["sum", "normalized"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("rule", [("vector", True), ("scalar", False)], ids=str)
def test_pieces_give_the_whole_and_the_state_its_sums(rule, sizes, normalize):
    if normalize and rule[1]:
        pytest.skip("corrected normalizers may be near zero")
    tensors, mask = draw(rule, length=21), draw_mask(21)
    given = [x for x in tensors if x is not None]

    def read(*pieces):
        *pieces, mask, state = pieces
        rest = iter(pieces)
        pieces = [x if x is None else next(rest) for x in tensors]
        options = dict(key_mask=mask, state=state, chunk_size=4, normalize=normalize)
        return attend(*pieces, **options)

    start = linear_attention_state(BATCH, HEADS, FEATURES, VALUE_DIM)
    output, state = read_in_pieces(read, start, (*given, mask), sizes(21))
    correct, sums = recurrence(*tensors, mask, normalize=normalize)
    np.testing.assert_allclose(output, correct, **TOLERANCE)
    scale = np.exp(to_numpy(state["log_scale"]))[..., None, None]
    received = to_numpy(state["sum"]) * scale
    np.testing.assert_allclose(received, sums[..., :VALUE_DIM], **TOLERANCE)
    if normalize:
        received = to_numpy(state["normalizer"]) * scale[..., 0]
        np.testing.assert_allclose(received, sums[..., -1], **TOLERANCE)
    assert {name: x.shape for name, x in state.items()} == {
        name: x.shape for name, x in start.items()
    }


def test_gradients_flow_through_the_state():
    tensors = draw(length=21)

    def whole(*tensors):
        return weighed_sum([attend(*tensors, chunk_size=8)])

    def pieces(*tensors):
        state = linear_attention_state(BATCH, HEADS, FEATURES, VALUE_DIM)
        outputs = []
        for part in (slice(0, 12), slice(12, 13), slice(13, 21)):
            pieces = [x[:, part] for x in tensors]
            output, state = attend(*pieces, state=state, chunk_size=8)
            outputs.append(output)
        return weighed_sum([ops.concatenate(outputs, axis=1)])

    for ours, theirs in zip(
        gradients(pieces, *tensors), gradients(whole, *tensors), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gated", ("scalar", False)),
        ("gated", ("vector", False)),
        ("delta", (None, True)),
        ("gated_delta", ("scalar", True)),
        ("gated_delta", ("vector", True)),
    ],
    ids=str,
)
def test_onnx_gives_the_same(name, rule):
    onnx = pytest.importorskip("onnx", "1.23")
    from onnx.reference import ReferenceEvaluator

    tensors = draw(rule)
    *past, later = draw(seed=1)[:3], [x if x is None else x[:, :9] for x in tensors]
    # A nonempty state, from other keys.
    start = linear_attention_state(BATCH, HEADS, FEATURES, VALUE_DIM)
    _, start = linear_attention(*past[0], causal=True, normalize=False, state=start)
    output, state = attend(*later, state=start)

    flat = [x if x is None else x.reshape(*x.shape[:2], -1) for x in later]
    feeds = dict(zip(("query", "key", "value", "decay", "beta"), flat, strict=True))
    scale = np.exp(to_numpy(start["log_scale"]))[..., None, None]
    feeds["past_state"] = to_numpy(start["sum"]) * scale
    order = ("query", "key", "value", "past_state", "decay", "beta")
    float32 = onnx.TensorProto.FLOAT
    node = onnx.helper.make_node(
        "LinearAttention",
        [key if feeds[key] is not None else "" for key in order],
        ["output", "state"],
        update_rule=name,
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        scale=1.0,
    )
    feeds = {key: x for key, x in feeds.items() if x is not None}
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [
            onnx.helper.make_tensor_value_info(k, float32, x.shape)
            for k, x in feeds.items()
        ],
        [
            onnx.helper.make_tensor_value_info(k, float32, None)
            for k in ("output", "state")
        ],
    )
    opset = onnx.helper.make_opsetid("", 27)
    model = onnx.helper.make_model(graph, opset_imports=[opset])
    theirs, their_state = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(
        to_numpy(output).reshape(theirs.shape), theirs, **TOLERANCE
    )
    received = to_numpy(state["sum"])
    received = received * np.exp(to_numpy(state["log_scale"]))[..., None, None]
    np.testing.assert_allclose(received, their_state, **TOLERANCE)


STRENGTHS = {
    "weak": lambda g: g * 1e-3,
    "strong": lambda g: np.full_like(g, -50),
    # Positions after strong decays must keep their precision.
    "mixed": lambda g: np.where(
        np.sin(np.arange(g.size)).reshape(g.shape) > 0, g * 0.01, -50
    ),
    "minus infinity": lambda g: np.where(
        np.arange(g.size).reshape(g.shape) % 7, g, -np.inf
    ),
}


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS.keys())
@pytest.mark.parametrize("decays", ["scalar", "vector"])
def test_decays_of_any_strength(decays, strength):
    tensors = draw((decays, True), length=70)
    tensors[3] = strength(tensors[3]).astype("float32")
    correct, _ = recurrence(*tensors)
    received = attend(*tensors)
    np.testing.assert_allclose(to_numpy(received), correct, **TOLERANCE)
    for gradient in squares_gradient(decays)(*tensors):
        assert np.all(np.isfinite(gradient))


@functools.cache
def squares_gradient(decays):
    """The gradient of the sum of the outputs' squares, compiled once."""
    return gradient_function(lambda *xs: ops.sum(ops.square(attend(*xs))))


@pytest.mark.parametrize("decays", [None, "vector"], ids=["plain", "decaying"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_keys_that_repeat(beta, decays):
    tensors = draw((decays, True), length=70)
    tensors[1][:] = tensors[1][:, :1]
    tensors[4][:] = beta
    correct, _ = recurrence(*tensors)
    received = to_numpy(attend(*tensors))
    np.testing.assert_allclose(received, correct, rtol=1e-4, atol=1e-4)
    if beta == 0:
        assert np.all(received == 0)
    if beta == 1 and decays is None:
        # The key's old value is replaced.
        weights = (tensors[0] * tensors[1]).sum(-1, keepdims=True)
        np.testing.assert_allclose(received, weights * tensors[2], **TOLERANCE)


@pytest.mark.parametrize("lengths", [(1, 1), (130, 130), (9, 37), (37, 9)], ids=str)
def test_lengths(lengths):
    query, *keys = draw(length=max(lengths))
    tensors = [query[:, : lengths[0]], *(x[:, : lengths[1]] for x in keys)]
    correct, _ = recurrence(*tensors)
    for implementation in ("chunked", "reference"):
        received = attend(*tensors, implementation=implementation)
        np.testing.assert_allclose(to_numpy(received), correct, **TOLERANCE)


def test_an_empty_batch_gives_an_empty_batch():
    tensors = [x[:0] for x in draw()]
    assert tuple(attend(*tensors).shape) == tensors[2].shape


def test_half_precision_is_computed_in_float32():
    tensors = [ops.cast(x, "bfloat16") for x in draw()]
    output = attend(*tensors)
    correct, _ = recurrence(*(to_numpy(ops.cast(x, "float32")) for x in tensors))
    np.testing.assert_allclose(
        to_numpy(ops.cast(output, "float32")), correct, rtol=1e-2, atol=1e-3
    )


def test_sizes_that_are_not_known(backend):
    if backend != "tensorflow":
        pytest.skip("TensorFlow alone traces unknown sizes")
    import tensorflow as tf

    tensors, mask = draw(), draw_mask(LENGTH)

    def gradients_of_all(mask, *tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = attend(*tensors, key_mask=mask, chunk_size=20)
            loss = tf.reduce_sum(output * output)
        return output, *tape.gradient(loss, tensors)

    signature = [tf.TensorSpec((None, None), tf.bool)]
    signature += [tf.TensorSpec((None, None, *x.shape[2:])) for x in tensors]
    traced = tf.function(gradients_of_all, input_signature=signature)
    by_xla = tf.function(gradients_of_all, input_signature=signature, jit_compile=True)
    expected = traced(mask, *tensors)
    for ours, theirs in zip(by_xla(mask, *tensors), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    correct, _ = recurrence(*tensors, mask)
    np.testing.assert_allclose(expected[0], correct, **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_decay": np.zeros((2, 37))}, r"log_decay\.shape=\(2, 37\)"),
        ({"log_decay": np.zeros((2, 37, 2, 3))}, "by feature of `key_features`"),
        ({"beta": np.zeros((2, 37, 2, 5))}, r"beta\.shape=\(2, 37, 2, 5\)"),
        ({"causal": False}, "causal=False"),
        (
            {"key_log_weight": np.zeros((2, 37, 2))},
            "cannot be used together",
        ),
        ({"implementation": "triton"}, "implementation='triton'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors(changes, message):
    names = ("query", "key", "value", "log_decay", "beta")
    arguments = dict(zip(names, draw(), strict=True))
    arguments = {"causal": True, **arguments, **changes}
    tensors = [arguments.pop(name) for name in names[:3]]
    with pytest.raises(ValueError, match=message):
        linear_attention(*tensors, **arguments)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("normalize", [False, True], ids=["sum", "normalized"])
@pytest.mark.parametrize("lengths", [(1, 1), (37, 37), (300, 300), (9, 37)], ids=str)
def test_a_decay_of_all_positions(lengths, normalize, corrects):
    """A decay of each head, without an axis of positions, is that of all of them."""
    if normalize and corrects:
        pytest.skip("normalizers may be near zero")
    query, *rest = draw((None, corrects), max(lengths))
    keys = [x if x is None else x[:, : lengths[1]] for x in rest]
    tensors = [query[:, : lengths[0]], *keys[:2]]
    beta, log_decay = keys[3], np.array([-0.9, -0.01], "float32")
    everywhere = np.broadcast_to(log_decay, keys[0].shape[:3])
    options = dict(causal=True, normalize=normalize, chunk_size=8)
    config = features_config(FEATURES, **options)

    def heads(*arrays):
        beta = arrays[3] if corrects else None
        rates = ops.convert_to_tensor(log_decay), beta
        return gated_attention_with_feature_maps(arrays[:3], rates, config)[0]

    def loss(*arrays):
        return weighed_sum([heads(*arrays)])

    def wanted_loss(*arrays):
        rates = ops.convert_to_tensor(everywhere), arrays[3] if corrects else None
        options = dict(normalize=normalize, implementation="reference")
        return weighed_sum([attend(*arrays[:3], *rates, **options)])

    arrays = [*tensors, *([] if beta is None else [beta])]
    correct, _ = recurrence(*tensors, everywhere, beta, normalize=normalize)
    received = heads(*map(ops.convert_to_tensor, arrays))
    np.testing.assert_allclose(to_numpy(received), correct, **TOLERANCE)
    pairs = zip(gradients(loss, *arrays), gradients(wanted_loss, *arrays), strict=True)
    for ours, theirs in pairs:
        limit = 1e-4 * np.abs(theirs).max() + 1e-6
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=limit)
