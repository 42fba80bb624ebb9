"""Attention over quantised keys, against dense float64 softmax."""

import dataclasses

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import CodeOptions, VQAttention
from keras_efficient_attn.ops import (
    linear_attention,
    soft_codes,
    vq_attention,
    vq_attention_state,
)
from keras_efficient_attn.ops.common.plan import BLOCK_SIZES
from keras_efficient_attn.ops.linear_attention import feature_maps
from keras_efficient_attn.ops.vq_attention import (
    codebook as codebooks,
)
from keras_efficient_attn.ops.vq_attention.calibration import fit_mixture
from tests import dense
from tests.autodiff import assert_slope, gradients, to_numpy

LENGTH, CODES, DIM = 23, 6, 4


def draw(length=LENGTH, key_length=None, seed=0):
    random = np.random.default_rng(seed)
    query = random.normal(size=(2, length, 2, DIM))
    key = random.normal(size=(2, key_length or length, 2, DIM))
    value = random.normal(size=(2, key_length or length, 2, 3))
    codes = random.normal(size=(2, CODES, DIM))
    mask = random.random((2, key_length or length)) > 0.3
    return *(x.astype("float32") for x in (query, key, value, codes)), mask


def definition(
    query, key, value, codes, mask, causal, order=0, rank=None, window=None, **options
):
    arrays = [x.astype("float64") for x in (query, key, codes)]
    similarity = dense.vq_similarity(*arrays, window=window, **options)
    if order == 2:
        factor = dense.vq_expansion(*arrays, rank, window, mask, causal)
        similarity = similarity * factor
    return dense.weigh(similarity, value, mask, causal)[0]


WINDOWS = {
    "no-window": dict(),
    "exact": dict(window=5),
    "quantised": dict(window=5, quantize_window=True),
    "soft": dict(sigma=np.array([0.5, 1.5], "float32")),
    "soft-window": dict(sigma=np.array([0.5, 1.5], "float32"), window=5),
    "mixture": dict(
        sigma=np.linspace(0.4, 1.5, 2 * 6, dtype="float32").reshape(2, 6),
        log_weights=np.linspace(-1, 1, 2 * 6, dtype="float32").reshape(2, 6),
        window=5,
    ),
    "expanded": dict(order=2),
    "expanded-window": dict(order=2, rank=2, window=5),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS.keys())
def test_every_block_length_gives_the_definition(options, causal):
    query, key, value, codes, mask = draw()
    arguments = dict(key_mask=mask, causal=causal, **options)
    correct = definition(query, key, value, codes, mask, causal, **options)
    for how in (dict(block_length=4), dict(block_length=LENGTH)):
        output = vq_attention(query, key, value, codes, **arguments, **how)
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


# Block lengths unique to this test, so that nothing was compiled before.
@pytest.mark.parametrize(
    ("sequential", "lengths"),
    [(False, (1, 3)), (True, (2, 5))],
    ids=["groups", "turns"],
)
@pytest.mark.parametrize("name", ["exact", "soft", "expanded-window"])
def test_caches_are_summed_in_groups_or_in_turn(name, sequential, lengths, monkeypatch):
    plan = dataclasses.replace(BLOCK_SIZES["cpu"], sequential_blocks=sequential)
    monkeypatch.setitem(BLOCK_SIZES, "cpu", plan)
    options = WINDOWS[name]
    query, key, value, codes, mask = draw()
    correct = definition(query, key, value, codes, mask, True, **options)
    arguments = dict(key_mask=mask, causal=True, **options)
    for length in lengths:
        output = vq_attention(
            query, key, value, codes, block_length=length, **arguments
        )
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "causal"),
    [((7, 19), True), ((7, 19), False), ((19, 7), False)],
    ids=str,
)
def test_lengths_that_differ(lengths, causal):
    query, key, value, codes, mask = draw(*lengths)
    arguments = dict(key_mask=mask, causal=causal, block_length=4)
    for options in ({}, {"window": 3}, {"window": 40}, {"order": 2, "rank": 1}):
        output = vq_attention(query, key, value, codes, **arguments, **options)
        correct = definition(query, key, value, codes, mask, causal, **options)
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sequential"),
    [("exact", False), ("exact", True), ("quantised", False), ("soft-window", False)],
)
def test_gradients_are_those_of_the_definition(name, sequential, monkeypatch):
    plan = dataclasses.replace(BLOCK_SIZES["cpu"], sequential_blocks=sequential)
    monkeypatch.setitem(BLOCK_SIZES, "cpu", plan)
    options = WINDOWS[name]
    query, key, value, codes, mask = draw()
    weight = np.random.default_rng(1).normal(size=value.shape).astype("float32")

    def loss(how):
        def of(query, key, value, codes):
            output = vq_attention(
                query, key, value, codes, key_mask=mask, causal=True, **how, **options
            )
            return ops.sum(ops.multiply(output, weight))

        return of

    # No other test compiles blocks of 6.
    blocks = {"block_length": 6 if sequential else 4}
    chunked = gradients(loss(blocks), query, key, value, codes)
    reference = {"implementation": "reference"}
    expected = gradients(loss(reference), query, key, value, codes)
    output = vq_attention(
        query, key, value, codes, key_mask=mask, causal=True, **reference, **options
    )
    correct = definition(query, key, value, codes, mask, True, **options)
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(chunked, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    if "sigma" not in options:
        assert np.all(chunked[3] == 0)


@pytest.mark.parametrize("length", [3, LENGTH])
def test_gradients_reach_the_values_of_earlier_keys(length):
    query, key, value, codes, _ = draw()
    random = np.random.default_rng(1)
    weight, sums, counts = (
        draw(size=size).astype("float32")
        for draw, size in (
            (random.normal, value.shape),
            (random.normal, (2, 2, CODES, 3)),
            (random.uniform, (2, 2, CODES)),
        )
    )

    def loss(sums, counts):
        output, _ = vq_attention(
            query,
            key,
            value,
            codes,
            causal=True,
            state={"code_sum": sums, "code_count": counts},
            block_length=length,
        )
        return ops.sum(ops.multiply(output, weight))

    grad_sums, grad_counts = gradients(loss, sums, counts)
    earlier = np.exp(np.einsum("bthd,hcd->bhtc", query, codes, dtype="float64"))
    similarity = dense.vq_similarity(query, key, codes) * np.tri(LENGTH)
    totals = similarity.sum(-1) + np.einsum("bhtc,bhc->bht", earlier, counts)
    expected = np.einsum("bhtc,bthv->bhcv", earlier / totals[..., None], weight)
    np.testing.assert_allclose(grad_sums, expected, rtol=1e-4, atol=1e-5)
    assert np.all(grad_counts == 0)


@pytest.mark.parametrize(
    ("name", "causal"), [("expanded", False), ("expanded-window", True)]
)
def test_expanded_keys_learn_as_the_definition_says(name, causal):
    query, key, value, codes, mask = draw()
    weight = np.random.default_rng(1).normal(size=value.shape).astype("float32")

    def loss(query, key, value):
        arguments = dict(key_mask=mask, causal=causal, block_length=8)
        output = vq_attention(query, key, value, codes, **arguments, **WINDOWS[name])
        return ops.sum(ops.multiply(output, weight))

    def exact_loss(query, key, value):
        output = definition(query, key, value, codes, mask, causal, **WINDOWS[name])
        return (output * weight).sum()

    arrays = query, key, value
    for i, gradient in enumerate(gradients(loss, *arrays, xla=True)):
        assert_slope(gradient, exact_loss, arrays, i, tolerance=2e-6)


def test_the_definition_computes_in_float64():
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 2, 9, 2, 4))
    codes = random.normal(size=(2, 5, 4))
    tensors = (
        ops.convert_to_tensor(x, dtype="float64") for x in (query, key, value, codes)
    )
    received = vq_attention(*tensors, implementation="reference")
    # Each key has the weight of its nearest code.
    squares = ((key[..., None, :] - codes) ** 2).sum(-1)
    nearest = squares.argmin(-1)
    stand_in = np.stack([codes[h][nearest[..., h]] for h in range(2)], axis=2)
    weights = np.exp(np.einsum("bthd,bshd->bhts", query, stand_in))
    expected = np.einsum("bhts,bshd->bthd", weights, value)
    expected /= weights.sum(-1).transpose(0, 2, 1)[..., None]
    np.testing.assert_allclose(to_numpy(received), expected, rtol=1e-5)


def test_one_expanded_code_at_zero_is_taylor_attention():
    query, key, value, codes, mask = draw()
    output = vq_attention(
        query, key, value, 0 * codes[:, :1], order=2, key_mask=mask, causal=True
    )
    products = dense.dots(query.astype("float64"), key.astype("float64"))
    correct = dense.weigh(1 + products + products**2 / 2, value, mask, True)[0]
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


def test_straight_through_keys_learn_where_the_window_shows_them():
    query, key, value, codes, _ = draw()
    weight = np.random.default_rng(1).normal(size=value.shape).astype("float32")

    def loss(key):
        output = vq_attention(
            query, key, value, codes, window=5, quantize_window=True, causal=True
        )
        return ops.sum(ops.multiply(output, weight))

    squared = ((key[:, :, :, None] - codes[None, None]) ** 2).sum(-1)
    quantised = np.einsum("bshc,hcd->bshd", np.eye(CODES)[squared.argmin(-1)], codes)

    def exact_loss(quantised):
        """The codes in the window move with the keys; codes beyond it stay."""
        far = dense.vq_similarity(query, key, codes)
        near = np.exp(dense.dots(query, quantised))
        distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        similarity = np.where(distance < 5, near, far)
        return (dense.weigh(similarity, value, causal=True)[0] * weight).sum()

    (gradient,) = gradients(loss, key)
    assert_slope(gradient, exact_loss, [quantised])


def test_gradients_through_the_cache_can_be_stopped():
    query, key, value, codes, _ = draw()
    weight = np.random.default_rng(1).normal(size=value.shape).astype("float32")

    def loss(query, value):
        output = vq_attention(
            query,
            key,
            value,
            codes,
            window=5,
            causal=True,
            gradient_through_cache=False,
            block_length=4,
        )
        return ops.sum(ops.multiply(output, weight))

    grad_query, grad_value = gradients(loss, query, value)
    similarity = dense.vq_similarity(query, key, codes, window=5)
    weights = dense.weigh(similarity, value, causal=True)[1]
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    expected = np.einsum("bhts,bthv->bshv", weights * (distance < 5), weight)
    np.testing.assert_allclose(grad_value, expected, rtol=1e-4, atol=1e-5)

    def exact_loss(query):
        similarity = dense.vq_similarity(query, key, codes, window=5)
        return (dense.weigh(similarity, value, causal=True)[0] * weight).sum()

    assert_slope(grad_query, exact_loss, [query])


def test_random_soft_codes_are_performer_features():
    query, key, value, _, mask = draw()
    rows = np.random.default_rng(2).normal(size=(8, DIM)).astype("float32")
    codes = np.stack([rows, rows])
    mixture = dict(
        sigma=np.ones(2, "float32"), log_weights=np.square(codes).sum(-1) / 2
    )
    output = vq_attention(
        query, key, value, codes, **mixture, key_mask=mask, causal=True, block_length=4
    )
    # FAVOR+ by its formula, with every key's features divided by their sum.
    wide = query.astype("float64"), key.astype("float64")
    kernel = dense.favor_plus(*wide, rows, None)
    features = np.exp(wide[1] @ rows.T - dense.squared_norm(wide[1]) / 2)
    mass = np.moveaxis(features.sum(-1), 1, 2)[:, :, None]
    correct = dense.weigh(kernel / mass, value, mask, True)[0]
    np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-5, atol=1e-6)

    # With the keys' masses they are Performer's features, as in this package.
    share, log_mass = soft_codes(key, codes, **mixture)
    np.testing.assert_allclose(to_numpy(ops.sum(share, axis=-1)), 1.0, rtol=1e-5)
    received = to_numpy(ops.exp(log_mass)[..., None] * share)
    np.testing.assert_allclose(received, features, rtol=1e-5)
    (key_features, scale), (query_features, _) = (
        feature_maps.positive_random_features(
            ops.convert_to_tensor(x), ops.convert_to_tensor(rows)
        )
        for x in (key, query)
    )
    arguments = dict(key_mask=mask, causal=True)
    value = ops.convert_to_tensor(value)
    theirs = linear_attention(
        query_features, key_features, value, key_log_weight=scale, **arguments
    )
    ours = linear_attention(
        query_features, share, value, key_log_weight=log_mass, **arguments
    )
    np.testing.assert_allclose(to_numpy(ours), to_numpy(theirs), rtol=1e-5, atol=1e-6)


def test_soft_codes_are_the_posterior_of_their_mixture():
    _, key, _, codes, _ = draw()
    mixture = WINDOWS["mixture"]
    sigma, log_weights = mixture["sigma"], mixture["log_weights"]
    squared = ((key[:, :, :, None].astype("float64") - codes) ** 2).sum(-1)
    joint = np.exp(log_weights - squared / (2 * sigma**2)) / sigma**DIM
    # Lists serve as well as arrays.
    share, log_mass = soft_codes(key, codes, sigma.tolist(), log_weights.tolist())
    np.testing.assert_allclose(
        to_numpy(log_mass), np.log(joint.sum(-1)), rtol=1e-4, atol=1e-4
    )
    expected = joint / joint.sum(-1, keepdims=True)
    np.testing.assert_allclose(to_numpy(share), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.any_backend
def test_expectation_maximisation_finds_the_mixture():
    random = np.random.default_rng(3)
    centres = np.array([[-4.0, 0, 0, 0], [0, 4, 0, 0], [4, 0, 3, 0]])
    widths, weights = np.array([0.3, 0.6, 1.2]), np.array([0.5, 0.3, 0.2])
    chosen = random.choice(3, size=6000, p=weights)
    keys = centres[chosen] + widths[chosen, None] * random.normal(size=(6000, DIM))
    begin = (centres + random.normal(size=centres.shape))[None]
    codes, sigma, found = fit_mixture(keys[:, None], begin, None, True, 30)
    np.testing.assert_allclose(codes[0], centres, atol=0.1)
    np.testing.assert_allclose(sigma[0], widths, rtol=0.05)
    np.testing.assert_allclose(found[0], weights, atol=0.02)
    # Parameters that are not fitted stay unchanged.
    _, sigma, found = fit_mixture(keys[:, None], begin, 0.7, False, 2)
    assert (sigma == 0.7).all() and (found == 1 / 3).all()


def test_sharp_soft_codes_are_hard_codes():
    query, key, value, codes, mask = draw()
    arguments = dict(key_mask=mask, window=3, causal=True)
    hard = vq_attention(query, key, value, codes, **arguments)
    for sigma in (1e-2, 1e-3):
        soft = vq_attention(
            query, key, value, codes, sigma=np.full(2, sigma, "float32"), **arguments
        )
        np.testing.assert_allclose(to_numpy(soft), to_numpy(hard), rtol=1e-4, atol=1e-5)


def check_code_without_keys(**options):
    """Queries of 1e3 point at a code that no key chose; the others still count."""
    value = np.arange(6.0, dtype="float32").reshape(1, 6, 1, 1)
    key = np.array([1.0, 2.0] * 3, "float32").reshape(1, 6, 1, 1)
    query = np.full_like(key, 1e3)
    codes = np.array([1.0, 2.0, 9.0], "float32").reshape(1, 3, 1)
    output = vq_attention(query, key, value, codes, causal=True, **options)
    # The largest key, 2, has all the weight as soon as it is seen.
    expected = [0, 1, 1, 2, 2, 3]
    np.testing.assert_allclose(to_numpy(output)[0, :, 0, 0], expected, atol=1e-4)


@pytest.mark.parametrize("sigma", [None, np.float32([0.05])], ids=["hard", "soft"])
def test_a_code_without_keys_sets_no_scale(sigma):
    check_code_without_keys(sigma=sigma, block_length=2)


STREAMED = {
    **WINDOWS,
    "wide-window": dict(window=40),
    "stopped": dict(window=5, gradient_through_cache=False),
    "expanded-in-part": dict(order=2, rank=3),
}


def stream(arrays, mask, pieces, options, relative=None):
    """The outputs of pieces of a sequence, joined, and the last state."""
    query, key, value, codes = arrays
    of_state = {n: x for n, x in options.items() if n in ("order", "rank", "window")}
    state = vq_attention_state(2, 2, CODES, DIM, 3, soft="sigma" in options, **of_state)
    outputs = []
    for start, stop in pieces:
        part = slice(start, stop)
        arguments = dict(key_mask=mask[:, part], **options)
        if relative is not None:
            position_query, position_key = relative
            arguments["position_query"] = position_query[:, part]
            arguments["position_key"] = position_key
        output, state = vq_attention(
            query[:, part],
            key[:, part],
            value[:, part],
            codes,
            causal=True,
            state=state,
            **arguments,
        )
        outputs.append(output)
    return ops.concatenate(outputs, axis=1), state


def tokens(start, stop):
    return [(i, i + 1) for i in range(start, stop)]


@pytest.mark.parametrize("options", STREAMED.values(), ids=STREAMED.keys())
def test_tokens_and_segments_share_a_state_and_give_the_definition(options):
    *arrays, mask = draw()
    # Masked keys are never read.
    arrays[1] = np.where(mask[..., None, None], arrays[1], np.nan)
    hidden = [x if i != 1 else np.nan_to_num(x) for i, x in enumerate(arrays)]
    known = {n: x for n, x in options.items() if n != "gradient_through_cache"}
    correct = definition(*hidden, mask, True, **known)
    states = []
    for pieces in (
        tokens(0, LENGTH),
        [(0, LENGTH)],
        [*tokens(0, 2), (2, 9), *tokens(9, 12), (12, LENGTH)],
    ):
        output, state = stream(arrays, mask, pieces, options)
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)
        states.append(state)
    for name, tensor in states[0].items():
        for other in states[1:]:
            np.testing.assert_allclose(
                to_numpy(other[name]), to_numpy(tensor), rtol=1e-4, atol=1e-5
            )


def test_tokens_have_relative_positions():
    *arrays, mask = draw()
    query, key, _, codes = (x.astype("float64") for x in arrays)
    random = np.random.default_rng(3)
    relative = random.normal(size=query.shape), random.normal(size=(5, 2, DIM))
    by_distance = np.einsum("bthd,mhd->bhtm", *relative)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    index = np.broadcast_to(np.clip(4 - distance, 0, 4), (2, 2, LENGTH, LENGTH))
    positions = np.take_along_axis(by_distance, index, axis=-1)
    similarity = dense.vq_similarity(query, key, codes, window=5, positions=positions)
    correct = dense.weigh(similarity, arrays[2], mask, True)[0]
    relative = [x.astype("float32") for x in relative]
    for pieces in (tokens(0, LENGTH), [(0, 8), *tokens(8, LENGTH)]):
        output, _ = stream(arrays, mask, pieces, dict(window=5), relative)
        np.testing.assert_allclose(to_numpy(output), correct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["exact", "quantised", "soft-window", "soft"])
def test_gradients_through_tokens_are_those_of_the_definition(name):
    options, length = WINDOWS[name], 9
    query, key, value, codes, mask = draw(length)
    weight = np.random.default_rng(1).normal(size=value.shape).astype("float32")

    def by_token(*arrays):
        output, _ = stream(arrays, mask, tokens(0, length), options)
        return ops.sum(ops.multiply(output, weight))

    def by_definition(*arrays):
        output = vq_attention(
            *arrays, key_mask=mask, causal=True, implementation="reference", **options
        )
        return ops.sum(ops.multiply(output, weight))

    received = gradients(by_token, query, key, value, codes)
    expected = gradients(by_definition, query, key, value, codes)
    for ours, theirs in zip(received, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


def test_hundred_thousand_bfloat16_tokens_are_counted_one_by_one():
    length, segment = 100_000, 20_000
    random = np.random.default_rng(0)
    key = np.where(random.random((1, length, 1, 1)) < 0.25, -1.0, 1.0)
    value = random.normal(size=(1, length, 1, 1)) + 3.0
    key, value = (ops.cast(x.astype("float32"), "bfloat16") for x in (key, value))
    codes = np.array([-1.0, 1.0], "float32").reshape(1, 2, 1)
    state = vq_attention_state(1, 1, 2, 1, 1)
    starts = [*range(0, length - segment, segment)]
    stops = [*starts[1:], length - 20]
    pieces = list(zip(starts, stops, strict=True))
    pieces += [(i, i + 1) for i in range(length - 20, length)]
    for start, stop in pieces:
        piece = slice(start, stop)
        output, state = vq_attention(
            key[:, piece],
            key[:, piece],
            value[:, piece],
            codes,
            causal=True,
            state=state,
            block_length=1000,
        )
    exact = to_numpy(ops.cast(value, "float32")).astype("float64").ravel()
    positive = to_numpy(ops.cast(key, "float32")).ravel() > 0
    counts = to_numpy(state["code_count"])[0, 0]
    np.testing.assert_array_equal(counts, [(~positive).sum(), positive.sum()])
    means = to_numpy(state["code_sum"])[0, 0, :, 0] / counts
    expected = [exact[~positive].mean(), exact[positive].mean()]
    np.testing.assert_allclose(means, expected, rtol=1e-5)
    sign = 1.0 if positive[-1] else -1.0
    weights = np.where(positive, np.exp(sign), np.exp(-sign))
    correct = (weights * exact).sum() / weights.sum()
    # The output is rounded to 8 bits, and nothing before it.
    output = float(to_numpy(ops.cast(output, "float32"))[0, 0, 0, 0])
    assert abs(output - correct) < correct * 2**-8


def test_codes_with_a_share_near_zero_have_finite_gradients():
    """A responsibility whose square leaves the range of float32."""
    key = np.zeros((1, 1, 1, 1), "float32")
    codes = np.array([[[0.0], [9.434]]], "float32")

    def loss(key, codes):
        sigma = np.ones(1, "float32")
        return ops.sum(vq_attention(key, key, 1.0 + key, codes, sigma=sigma))

    grad_key, grad_codes = gradients(loss, key, codes)
    # A single value is the output, whatever the weights.
    np.testing.assert_allclose(grad_key.ravel(), [1.0], rtol=1e-5)
    np.testing.assert_allclose(grad_codes.ravel(), [0.0, 0.0], atol=1e-6)


def test_k_means_finds_separate_clusters():
    random = np.random.default_rng(0)
    centres = random.normal(size=(2, 5, 3)) * 50
    members = random.integers(0, 5, 80)
    keys = np.moveaxis(centres[:, members], 0, 1) + random.normal(size=(80, 2, 3))
    keys = keys.astype("float32")
    valid = (np.arange(80) % 7 > 0).astype("float32")
    drawn = to_numpy(
        codebooks.plus_plus(
            ops.convert_to_tensor(np.where(valid[:, None, None] > 0, keys, 1e3)),
            ops.convert_to_tensor(valid),
            ops.convert_to_tensor(random.random((5, 2)).astype("float32")),
        )
    )
    for head in range(2):
        # Each is one of the keys, from a separate cluster.
        found = (drawn[head][:, None] == keys[valid > 0, head][None]).all(-1)
        assert set(members[valid > 0][found.argmax(1)]) == set(range(5))
        assert found.any(1).all()
    codes, counts, error = codebooks.lloyd(
        ops.convert_to_tensor(keys), ops.convert_to_tensor(drawn)
    )
    for head in range(2):
        means = np.stack([keys[members == i, head].mean(0) for i in range(5)])
        order = np.lexsort(means.T), np.lexsort(to_numpy(codes)[head].T)
        np.testing.assert_allclose(
            to_numpy(codes)[head][order[1]], means[order[0]], rtol=1e-4, atol=1e-4
        )
        distance = ((keys[:, head, None] - drawn[head][None]) ** 2).sum(-1).min(1)
        np.testing.assert_allclose(to_numpy(error)[head], distance.mean(), rtol=1e-4)
    assert to_numpy(counts).sum() == 2 * 80


def test_k_means_with_fewer_keys_than_codes_draws_all_of_them():
    keys = np.arange(4.0, dtype="float32").reshape(4, 1, 1)
    uniforms = np.random.default_rng(0).random((9, 1)).astype("float32")
    drawn = codebooks.plus_plus(
        ops.convert_to_tensor(keys), ops.ones((4,)), ops.convert_to_tensor(uniforms)
    )
    assert set(to_numpy(drawn).ravel()) == {0.0, 1.0, 2.0, 3.0}


def test_moving_averages_fade_together():
    sums, counts = np.array([[[2.0], [3.0]]]), np.array([[1.0, 0.01]])
    sums, counts = codebooks.update_averages(
        *(
            ops.convert_to_tensor(x.astype("float32"))
            for x in (sums, counts, np.array([[[8.0], [0.0]]]), np.array([[4.0, 0.0]]))
        ),
        momentum=0.75,
    )
    # 0.75 · 2 + 0.25 · 8 and 0.75 · 1 + 0.25 · 4; the other count would vanish, so it
    # stays.
    np.testing.assert_allclose(to_numpy(sums), [[[3.5], [3.0]]])
    np.testing.assert_allclose(to_numpy(counts), [[1.75, 0.01]])
    np.testing.assert_allclose(to_numpy(codebooks.codes_of(sums, counts))[0, 0], 2.0)


WRONG = [
    (dict(window=0), "window=0"),
    (dict(block_length=-1), "block_length=-1"),
    (dict(implementation="fast"), "implementation='fast'"),
    (dict(quantize_window=True), "window=None"),
    (dict(window=2, quantize_window=True, sigma=np.ones(2)), "`sigma`"),
    (dict(state={}), "causal=False"),
    (dict(order=1), "order=1"),
    (dict(order=2.0), "order=2.0"),
    (dict(rank=2), "order=0"),
    (dict(order=2, rank=DIM + 1), "rank=5"),
    (dict(order=2, sigma=np.ones(2)), "`sigma`"),
    (
        dict(sigma=np.ones(3)),
        r"\(heads,\) = \(2,\) or \(heads, codes\) = \(2, 6\). .*sigma\.shape=\(3,\)",
    ),
    (dict(log_weights=np.ones((2, 6))), "sigma=None"),
    (dict(sigma=np.ones(2), log_weights=np.ones(2)), r"log_weights\.shape=\(2,\)"),
    (dict(sigma=np.array([1.0, -1.0])), "`sigma` must be positive"),
    (dict(sigma=[0.0, 1.0]), "`sigma` must be positive"),
    (dict(order=2, window=2, quantize_window=True), "quantize_window=True"),
    (dict(position_query=np.zeros((2, LENGTH, 2, DIM))), "window=None"),
    (dict(window=5, position_query=np.zeros((2, LENGTH, 2, DIM))), "given together"),
    (dict(window=5, position_key=np.zeros((9, 2, DIM))), "given together"),
    (
        dict(
            window=5,
            causal=True,
            position_query=np.zeros((2, LENGTH, 2, DIM)),
            position_key=np.zeros((3, 2, DIM)),
        ),
        r"\(5, 2, 4\)",
    ),
    (
        dict(implementation="reference", gradient_through_cache=False),
        "gradient_through_cache=False",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_what_cannot_be_honoured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vq_attention(*draw()[:4], **options)


def test_shapes_that_do_not_agree_are_refused():
    query, key, value, codes, _ = draw()
    with pytest.raises(ValueError, match=r"codebook\.shape=\(6, 4\)"):
        vq_attention(query, key, value, codes[0])
    with pytest.raises(ValueError, match=r"value\.shape=\(2, 22, 2, 3\)"):
        vq_attention(query, key, value[:, 1:], codes)


@pytest.mark.parametrize("value", [3e19, np.inf])
def test_keys_that_overflow_are_not_pulled_to_codes(value):
    """The layer's loss is the mean squared distance of the other keys."""
    codes = CodeOptions(init="random", commitment_weight=0.5)
    layer = VQAttention(1, DIM, num_codes=CODES, codes=codes, qk_norm=False, seed=1)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, DIM)).astype("float32")
    layer.build(x.shape, x.shape)
    kernel, bias = layer.key_dense.get_weights()
    key = (np.einsum("btd,dhk->bthk", x, kernel) + bias) * DIM**-0.25
    distances = key[:, :, 0, None] - to_numpy(layer.codebook)[0]
    distances = np.square(distances).sum(-1).min(-1)
    x[0, 3] = x[1, 5] = value
    others = np.isfinite(x).all(-1) & (np.abs(x) < 1e9).all(-1)
    layer(x, x, training=True)
    (loss,) = layer.losses
    np.testing.assert_allclose(
        to_numpy(loss), 0.5 * distances[others].mean(), rtol=1e-4
    )
