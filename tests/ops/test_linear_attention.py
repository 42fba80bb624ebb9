import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_efficient_attn.ops import linear_attention, linear_attention_state
from tests import dense
from tests.autodiff import gradients, to_numpy
from tests.ops.linear_attention_cases import weighed_sum
from tests.ops.pieces import read_in_pieces


def draw(batch=2, length=50, heads=2, features=5, value_dim=3, seed=0):
    random = np.random.default_rng(seed)
    shape = (batch, length, heads, features)
    query, key = (random.gamma(1.0, size=shape).astype("float32") for _ in range(2))
    value = random.normal(size=(batch, length, heads, value_dim)).astype("float32")
    log_weight = 50 * random.normal(size=(batch, length, heads)).astype("float32")
    mask = random.random((batch, length)) > 0.3
    return query, key, value, log_weight, mask


def definition(query, key, value, log_weight, mask, causal):
    """Dense float64, each row relative to the largest weight it may see."""
    logs = np.log(dense.dots(query.astype("float64"), key.astype("float64")))
    if log_weight is not None:
        logs = logs + np.moveaxis(log_weight.astype("float64"), 1, 2)[:, :, None]
    return dense.weigh_logs(logs, value, mask, causal)[0]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_both_implementations_equal_the_definition(weighted, masked, causal):
    query, key, value, log_weight, mask = draw()
    log_weight = log_weight if weighted else None
    mask = mask if masked else None
    arguments = dict(key_log_weight=log_weight, key_mask=mask, causal=causal)
    correct = definition(query, key, value, log_weight, mask, causal)
    for implementation in ("chunked", "reference"):
        output = linear_attention(
            query, key, value, chunk_size=2, implementation=implementation, **arguments
        )
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "sum"])
@pytest.mark.parametrize(
    ("causal", "masked", "weighted"),
    [
        (False, True, True),
        (True, True, True),
        (True, True, False),
        (True, False, True),
        (True, False, False),
    ],
)
def test_gradients_equal_those_of_the_reference(causal, masked, weighted, normalize):
    # Chunks of 2 divide the length: no padding, and so no mask.
    query, key, value, log_weight, mask = draw(length=24)
    arrays = (query, key, value) + ((log_weight / 50,) if weighted else ())
    mask = mask if masked else None

    def loss(implementation):
        def of(query, key, value, log_weight=None):
            output = linear_attention(
                query,
                key,
                value,
                key_log_weight=log_weight,
                key_mask=mask,
                causal=causal,
                normalize=normalize,
                chunk_size=2,
                implementation=implementation,
            )
            return weighed_sum([output])

        return of

    reference = gradients(loss("reference"), *arrays)
    for ours, theirs in zip(
        gradients(loss("chunked"), *arrays), reference, strict=True
    ):
        limit = 1e-4 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=limit)


@settings(max_examples=6, deadline=None)
@given(length=st.integers(1, 40), chunk_size=st.integers(1, 50))
def test_chunk_size_changes_nothing(length, chunk_size):
    query, key, value, log_weight, _ = draw(batch=1, length=length)
    output = linear_attention(
        query,
        key,
        value,
        key_log_weight=log_weight,
        causal=True,
        chunk_size=chunk_size,
    )
    correct = definition(query, key, value, log_weight, None, True)
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


def test_a_huge_weight_later_does_not_push_out_the_past():
    """One maximum over all keys would underflow every row before the last."""
    query, key, value, _, _ = draw()
    log_weight = np.zeros(key.shape[:3], "float32")
    log_weight[:, -1] = 1e6
    log_weight[:, 0] = -1e6
    output = to_numpy(
        linear_attention(
            query, key, value, key_log_weight=log_weight, causal=True, chunk_size=4
        )
    )
    correct = definition(query, key, value, log_weight, None, True)
    np.testing.assert_allclose(output, correct, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output[:, 0], value[:, 0], rtol=1e-5)
    np.testing.assert_allclose(output[:, -1], value[:, -1], rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("hidden", [slice(0, 1), slice(0, 8), slice(None)], ids=str)
def test_a_log_weight_of_minus_infinity_hides_the_key(causal, hidden):
    query, key, value, log_weight, _ = draw()
    log_weight = log_weight / 50
    log_weight[:, hidden] = -np.inf
    correct = definition(query, key, value, log_weight, None, causal)
    for implementation in ("chunked", "reference"):
        output = linear_attention(
            query,
            key,
            value,
            key_log_weight=log_weight,
            causal=causal,
            chunk_size=4,
            implementation=implementation,
        )
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_an_empty_batch_gives_an_empty_batch(weighted, causal):
    query, key, value, log_weight, mask = (x[:0] for x in draw())

    def attend(query, key, value):
        return linear_attention(
            query,
            key,
            value,
            key_mask=mask,
            key_log_weight=log_weight if weighted else None,
            causal=causal,
        )

    assert tuple(attend(query, key, value).shape) == value.shape
    slopes = gradients(lambda *xs: ops.sum(attend(*xs)), query, key, value)
    assert [slope.shape for slope in slopes] == [x.shape for x in (query, key, value)]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_autocast_changes_nothing_on_torch(backend, weighted):
    if backend != "torch":
        pytest.skip("PyTorch alone has autocast")
    import torch

    query, key, value, log_weight, _ = draw()

    def loss(*xs):
        weights = log_weight if weighted else None
        output = linear_attention(*xs, key_log_weight=weights, causal=True)
        return ops.sum(output * output)

    expected = gradients(loss, query, key, value)
    with torch.autocast("cpu", torch.bfloat16):
        received = gradients(loss, query, key, value)
    for ours, theirs in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_of_values_of_an_unknown_size(backend):
    if backend != "tensorflow":
        pytest.skip("TensorFlow alone traces unknown sizes")
    import tensorflow as tf

    query, key, value, _, _ = draw()

    def gradient(query, key, value):
        with tf.GradientTape() as tape:
            tape.watch(query)
            output = linear_attention(query, key, value, causal=True)
            loss = tf.reduce_sum(output * output)
        return tape.gradient(loss, query)

    unknown = tf.TensorSpec((None, None, 2, None))
    shape = tf.TensorSpec((None, None, 2, 5))
    traced = tf.function(gradient, input_signature=[shape, shape, unknown])
    expected = gradient(*map(tf.constant, (query, key, value)))
    np.testing.assert_allclose(traced(query, key, value), expected, atol=1e-4)


def test_state_carries_weighted_and_unweighted_segments():
    query, key, value, log_weight, _ = draw()
    log_weight[:, 20:] = 0
    state = linear_attention_state(2, 2, 5, 3)
    first, state = linear_attention(
        query[:, :20],
        key[:, :20],
        value[:, :20],
        key_log_weight=log_weight[:, :20],
        causal=True,
        state=state,
    )
    second, state = linear_attention(
        query[:, 20:], key[:, 20:], value[:, 20:], causal=True, state=state
    )
    correct = definition(query, key, value, log_weight, None, True)
    output = np.concatenate([to_numpy(first), to_numpy(second)], axis=1)
    np.testing.assert_allclose(output, correct, rtol=1e-4, atol=1e-5)
    # The state matches its documentation: sums up to exp(log_scale).
    scale = to_numpy(state["log_scale"]).astype("float64")
    shifted = np.exp(log_weight.astype("float64") - scale[:, None])
    weighted = key * shifted[..., None]
    total = np.einsum("bshm,bshv->bhmv", weighted, value)
    np.testing.assert_allclose(to_numpy(state["sum"]), total, rtol=1e-4, atol=1e-4)
    total = weighted.sum(1)
    np.testing.assert_allclose(
        to_numpy(state["normalizer"]), total, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"value": np.zeros((2, 50, 3))}, ValueError, "`value` must have the shape"),
        ({"key": np.zeros((2, 50, 2, 4))}, ValueError, "agree in batch, heads and dim"),
        ({"value": np.zeros((2, 49, 2, 3))}, ValueError, "batch, length and heads"),
        ({"key_mask": np.ones((2, 49))}, ValueError, r"key_mask\.shape=\(2, 49\)"),
        ({"key_log_weight": np.ones((2, 50))}, ValueError, "key_log_weight.shape"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"implementation": "fast"}, ValueError, "implementation='fast'"),
        ({"value": np.zeros((2, 50, 2, 3), "int32")}, TypeError, "int32"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors(changes, error, message):
    query, key, value, _, _ = draw()
    arguments = {"query": query, "key": key, "value": value, **changes}
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(error, match=message):
        linear_attention(*tensors, **arguments)


def test_state_errors():
    query, key, value, _, _ = draw()
    state = linear_attention_state(2, 2, 5, 3)
    with pytest.raises(ValueError, match="causal=False"):
        linear_attention(query, key, value, state=state)
    with pytest.raises(ValueError, match="same length"):
        linear_attention(query[:, :9], key, value, causal=True, state=state)
    with pytest.raises(ValueError, match="does not support `state`"):
        linear_attention(
            query, key, value, causal=True, state=state, implementation="reference"
        )


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_one_position_at_a_time_gives_the_definition(weighted, masked, normalize):
    query, key, value, log_weight, mask = draw(length=17)
    # The mask hides the first keys, and weights hide others.
    mask[:, :3] = False
    log_weight[:, 5:8] = -np.inf
    if not normalize:
        log_weight = log_weight / 50
    log_weight = log_weight if weighted else None
    mask = mask if masked else None
    if normalize:
        correct = definition(query, key, value, log_weight, mask, True)
    else:
        correct = dense.dots(query.astype("float64"), key.astype("float64"))
        if weighted:
            correct *= np.exp(np.moveaxis(log_weight, 1, 2))[:, :, None]
        correct, _ = dense.weigh(correct, value, mask, True, normalize=False)
    options = dict(key_log_weight=log_weight) if weighted else {}
    if masked:
        key = np.where(mask[..., None, None], key, np.nan)
        value = np.where(mask[..., None, None], value, np.nan)
        options["key_mask"] = mask

    def attend(*pieces):
        *tensors, state = pieces
        given = dict(zip(options, tensors[3:], strict=True), normalize=normalize)
        return linear_attention(
            *tensors[:3], **given, causal=True, state=state, chunk_size=2
        )

    tensors = query, key, value, *options.values()
    state = linear_attention_state(2, 2, 5, 3)
    # Tokens, then a segment that continues their state, then tokens that continue its.
    sizes = [1] * 5 + [4] + [1] * 8
    output, _ = read_in_pieces(attend, state, tensors, sizes)
    np.testing.assert_allclose(output, correct, rtol=1e-4, atol=1e-5)


def test_gradients_of_one_position_are_those_of_the_reference():
    query, key, value, log_weight, _ = draw(length=1)
    log_weight = log_weight / 50
    past = draw(length=4, seed=1)[:3]
    arrays = [
        np.concatenate(pair, axis=1)
        for pair in zip(past, (query, key, value), strict=True)
    ]
    weights = np.concatenate([np.zeros((2, 4, 2), "float32"), log_weight], axis=1)

    def stream(query, key, value, weights):
        state = linear_attention_state(2, 2, 5, 3)
        for start in range(5):
            part = slice(start, start + 1)
            output, state = linear_attention(
                query[:, part],
                key[:, part],
                value[:, part],
                key_log_weight=weights[:, part],
                causal=True,
                state=state,
            )
        return weighed_sum([output])

    def reference(query, key, value, weights):
        output = linear_attention(
            query,
            key,
            value,
            key_log_weight=weights,
            causal=True,
            implementation="reference",
        )
        return weighed_sum([output[:, 4:]])

    ours = gradients(stream, *arrays, weights)
    for one, other in zip(ours, gradients(reference, *arrays, weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "its_backend"),
    [("pallas", "jax"), ("triton", "torch"), ("fla", "torch")],
)
def test_a_kernel_names_its_backend(kernel, its_backend, backend):
    if backend == its_backend:
        pytest.skip(f"{backend} has the kernel")
    query, key, value, *_ = draw()
    message = f"needs the backend '{its_backend}'.*{backend!r}"
    with pytest.raises(ValueError, match=message):
        linear_attention(query, key, value, implementation=kernel)
