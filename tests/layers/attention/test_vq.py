"""VQAttention beyond the contract: its codebook and updates."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_efficient_attn import CodeOptions, VQAttention
from tests import dense
from tests.autodiff import to_numpy
from tests.layers.streams import stream
from tests.saving import assert_same_model, saved_and_loaded

DIM, HEADS, KEY_DIM, CODES = 6, 2, 4, 5


def inputs(batch=2, length=20, seed=0):
    x = np.random.default_rng(seed).normal(size=(batch, length, DIM))
    return x.astype("float32")


def make(**options):
    """A layer with options of its own and of its codes."""
    arguments = dict(num_codes=CODES, window=3, block_length=8, seed=1)
    names = {field.name for field in dataclasses.fields(CodeOptions)} & set(options)
    codes = CodeOptions(**{name: options.pop(name) for name in names})
    return VQAttention(HEADS, KEY_DIM, codes=codes, **{**arguments, **options})


def built(**options):
    layer = make(**options)
    layer.build((2, 20, DIM), (2, 20, DIM))
    return layer


def weights(layer):
    """The codebook's weights by name."""
    return {w.name: to_numpy(w).astype("float64") for w in layer._codebook.weights}


def keys(layer, x):
    """The keys that the layer computes from `x`, in float64."""
    kernel, bias = (np.asarray(w, "float64") for w in layer.key_dense.get_weights())
    key = np.einsum("btd,dhk->bthk", x, kernel) + bias
    return (dense.rms(key) if layer.qk_norm else key) * KEY_DIM**-0.25


def random_maps(layer):
    """Sets the coordinates in which keys are compared; returns the keys' map."""
    query_map = np.random.default_rng(4).normal(size=(HEADS, KEY_DIM, KEY_DIM))
    key_map = np.swapaxes(np.linalg.inv(query_map), 1, 2)
    layer._coordinates.assign(query_map, key_map)
    return key_map


def nearest(key, codes):
    return ((key[:, :, :, None] - codes[None, None]) ** 2).sum(-1).argmin(-1)


@pytest.mark.parametrize("init", ["random", "first_batch"])
def test_training_without_rows_moves_no_code(init, backend):
    if backend == "tensorflow":
        pytest.skip("docs/limits.md")
    layer = built(init=init, revive_after=1)
    before = weights(layer)
    for length in (1, 8):
        x = inputs(batch=0, length=length)
        assert tuple(layer(x, x, training=True).shape) == x.shape
    after = weights(layer)
    codes = (w["sum"] / w["count"][..., None] for w in (after, before))
    np.testing.assert_allclose(*codes, rtol=1e-5)


@pytest.mark.parametrize("fitted", [False, True], ids=["euclidean", "fitted"])
def test_one_training_call_moves_the_codes_as_by_hand(fitted):
    layer = built(init="random", momentum=0.75, commitment_weight=0.5)
    key_map = np.broadcast_to(np.eye(KEY_DIM), (HEADS, KEY_DIM, KEY_DIM))
    if fitted:
        key_map = random_maps(layer)
    x, mask = inputs(), np.random.default_rng(1).random((2, 20)) > 0.3
    before, key = weights(layer), keys(layer, x)
    output = to_numpy(layer(x, x, key_mask=mask, use_causal_mask=True, training=True))

    # The output used the old codes; then they moved.
    old = built(init="random", momentum=0.75)
    old.set_weights(layer.get_weights())
    old._codebook.set_weights([before[w.name] for w in layer._codebook.weights])
    expected, _ = dense.layer_output(
        old, dense.vq_heads, x, x, key_mask=mask, causal=True
    )
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)

    mapped = np.einsum("bthd,hde->bthe", key, key_map), before["sum"] @ key_map
    index, after = nearest(*mapped), weights(layer)
    chosen = np.eye(CODES)[index] * mask[..., None, None]
    counts = chosen.sum((0, 1))
    sums = np.einsum("bshc,bshd->hcd", chosen, key)
    np.testing.assert_allclose(
        after["count"], 0.75 * before["count"] + 0.25 * counts, rtol=1e-5
    )
    np.testing.assert_allclose(
        after["sum"], 0.75 * before["sum"] + 0.25 * sums, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        to_numpy(layer.codebook),
        after["sum"] / after["count"][..., None],
        rtol=1e-5,
    )
    codes = np.take_along_axis(before["sum"][None, None], index[..., None, None], 3)
    errors = ((key - codes[:, :, :, 0]) ** 2).sum(-1)
    loss = 0.5 * errors[mask].sum(-1).mean()
    np.testing.assert_allclose(to_numpy(sum(layer.losses)), loss, rtol=1e-4)
    energy = (key**2).sum(-1)
    relative = np.sqrt(errors[mask].sum(0) / energy[mask].sum(0))
    np.testing.assert_allclose(layer.quantization_error(), relative.mean(), rtol=1e-4)
    share = 0.75 * 0.25 + 0.25 * counts
    share = share / share.sum(-1, keepdims=True)
    entropy = -(share * np.log2(share)).sum(-1).mean()
    np.testing.assert_allclose(layer.codebook_entropy(), entropy, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"init": "random"}], ids=str)
def test_only_training_moves_the_codes(options):
    layer, x = built(**options), inputs()
    before = weights(layer)

    def is_unchanged():
        after = weights(layer)
        return all(np.array_equal(after[name], before[name]) for name in before)

    layer(x, x)
    layer(x, x, training=False)
    assert is_unchanged() and not layer.losses
    # Padding alone causes no update.
    layer(x, x, key_mask=np.zeros((2, 20), bool), training=True)
    old = before["sum"] / before["count"][..., None]
    np.testing.assert_allclose(to_numpy(layer.codebook), old, rtol=1e-6)
    layer = built(**options)
    layer.trainable = False
    layer(x, x, training=True)
    assert is_unchanged()
    layer.trainable = True
    layer(x, x, training=True)
    assert not is_unchanged()


def test_the_first_training_call_draws_the_codes_from_its_keys():
    # Without decay, the codes would be means; without the new keys, the drawn keys.
    layer, x = built(momentum=0.999999, revive_after=None), inputs()
    mask = np.arange(20)[None] < np.array([[20], [7]])
    layer(x, x, key_mask=mask, training=True)
    codes = to_numpy(layer.codebook)
    assert_codes_are_keys(layer, keys(layer, x)[mask])
    drawn = weights(layer)["drawn"]
    layer(10 * x, x, training=True)
    assert drawn == 1 and np.abs(to_numpy(layer.codebook) - codes).max() < 1e-3


def assert_codes_are_keys(layer, key):
    """Each code is one of the keys `(number, heads, dim)`, and another one."""
    for head, codes in enumerate(to_numpy(layer.codebook)):
        distance = ((codes[:, None] - key[:, head][None]) ** 2).sum(-1)
        assert distance.min(1).max() < 1e-4
        assert len(set(distance.argmin(1))) == len(codes)


def test_hidden_keys_are_no_codes():
    """A draw samples keys evenly from all, here including hidden keys."""
    layer = make(num_codes=2, window=None, momentum=0.999999, revive_after=None)
    x = np.random.default_rng(0).normal(size=(1, 256, DIM)).astype("float32")
    layer.build(x.shape, x.shape)
    mask = np.arange(256)[None] % 2 == 1
    layer(x, x, key_mask=mask, training=True)
    assert weights(layer)["drawn"] == 1
    assert_codes_are_keys(layer, keys(layer, x)[mask])


def test_calls_without_a_key_leave_the_draw_as_it_is():
    layer, x = built(momentum=0.5, revive_after=None), inputs()
    fresh = built(momentum=0.5, revive_after=None)
    fresh.set_weights(layer.get_weights())
    for _ in range(5):
        layer(x, x, key_mask=np.zeros((2, 20), bool), training=True)
    for drawing in (layer, fresh):
        drawing._codebook._generator.state.assign([1, 2])
        drawing(x, x, training=True)
    np.testing.assert_allclose(
        to_numpy(layer.codebook), to_numpy(fresh.codebook), rtol=1e-5
    )


@pytest.mark.parametrize("revive_after", [None, 1])
@pytest.mark.parametrize(
    ("value", "options"), [(np.inf, {}), (np.nan, {}), (3e19, dict(qk_norm=False))]
)
def test_keys_that_overflow_leave_no_trace_in_the_codes(value, options, revive_after):
    """They do as masked keys; squares of 3e19 exceed float32."""
    x = inputs()
    mask = np.random.default_rng(1).random(x.shape[:2]) > 0.3
    broken = np.where(mask[..., None], x, value).astype("float32")
    received, expected = (
        built(init="random", revive_after=revive_after, **options) for _ in range(2)
    )
    received.set_weights(expected.get_weights())
    for _ in range(3):
        received(broken, broken, training=True)
        expected(x, x, key_mask=mask, training=True)
    for name, weight in weights(expected).items():
        np.testing.assert_allclose(
            weights(received)[name], weight, rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert received.quantization_error() < 10


@pytest.mark.parametrize("method", ["call", "scores"])
def test_the_first_draw_waits_for_keys_that_are_finite(method):
    layer, x = built(), inputs()
    scores = dict(return_attention_scores=method == "scores")
    layer(x, x * np.nan, training=True, **scores)
    assert weights(layer)["drawn"] == 0
    x[:, ::2] = np.inf
    layer(x, x, training=True, **scores)
    assert weights(layer)["drawn"] == 1
    assert np.isfinite(to_numpy(layer.codebook)).all()


def test_codes_survive_a_step_that_the_optimizer_skips(backend):
    layer = VQAttention(HEADS, KEY_DIM, num_codes=CODES, window=3, seed=1)
    sequence = keras.Input((None, DIM))
    model = keras.Model(sequence, layer(sequence, sequence))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", jit_compile=backend != "torch")
    x = inputs()
    model.fit(x, x, verbose=0)
    before = [to_numpy(w) for w in layer.trainable_variables]
    codes = to_numpy(layer.codebook)
    model.fit(x * np.inf, x, verbose=0)
    for old, weight in zip(before, layer.trainable_variables, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), old)
    np.testing.assert_allclose(to_numpy(layer.codebook), codes, rtol=1e-5)
    model.fit(x, x, verbose=0)
    assert np.isfinite(model.predict(x, verbose=0)).all()


def test_a_code_without_keys_moves_to_a_key_with_its_sum_and_count():
    layer, x = built(init="random", revive_after=3), inputs()
    far = weights(layer)
    far["sum"][:, 0] = 100.0
    # However much it was used before.
    far["usage"][:, 0] = 1000.0
    layer._codebook.set_weights([far[w.name] for w in layer._codebook.weights])
    for call in range(5):
        layer(x, x, training=True)
        moved = np.abs(to_numpy(layer.codebook)[:, 0]).max(-1) < 50
        # A code counts as used before the first call, and three have no key.
        assert moved.all() == (call >= 3), call
        if call == 3:
            after, key = weights(layer), keys(layer, x).reshape(-1, HEADS, KEY_DIM)
            for head in range(HEADS):
                place = after["sum"][head, 0] / after["count"][head, 0]
                distance = np.abs(key[:, head] - place).max(-1)
                assert distance.min() < 1e-5
                assert after["count"][head, 0] > after["count"][head].mean() / 2
    assert layer.codebook_usage() <= 1.0


def test_codes_stay_in_use_where_they_would_die():
    """Drifting keys leave most codes unused, unless the codes are revived."""

    def usage(revive_after):
        layer = make(
            num_codes=16, window=None, momentum=0.5, revive_after=revive_after, seed=2
        )
        layer.build((4, 64, DIM), (4, 64, DIM))
        random = np.random.default_rng(0)
        centre = np.zeros(DIM)
        for step in range(30):
            if step < 12:
                centre[step % DIM] += 1.5
            x = (centre + random.normal(size=(4, 64, DIM)) * 0.3).astype("float32")
            layer(x, x, training=True)
        assert np.isfinite(to_numpy(layer.codebook)).all()
        chosen = nearest(keys(layer, x), to_numpy(layer.codebook))
        return np.mean([len(set(chosen[..., h].ravel())) / 16 for h in range(HEADS)])

    assert usage(None) < 0.7 < 0.9 < usage(3)


def test_fit_draws_once_moves_and_goes_on_after_reload(tmp_path, backend):
    def compile_call(model):
        # The contract tests compile on all backends.
        model.compile("sgd", "mse", jit_compile=backend == "jax")
        return model

    sequence = keras.Input((None, DIM))
    layer = make(
        order=2,
        rank=2,
        dtype="mixed_bfloat16",
        revive_after=None,
        commitment_weight=0.1,
    )
    masked = keras.layers.Masking()(sequence)
    model = compile_call(keras.Model(sequence, layer(masked, masked)))
    x = inputs(batch=4)
    x[0, 9:] = 0.0
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)
    state = weights(layer)
    assert state["drawn"] == 1 and state["count"].sum() > 2 * CODES
    assert {str(w.dtype) for w in layer._codebook.weights} <= {
        "float32",
        "uint32",
        "int64",
        "int32",
    }
    restored = saved_and_loaded(model, tmp_path)
    assert_same_model(restored, model, x)
    for one in (model, restored):
        one.fit(x, x, batch_size=4, epochs=1, shuffle=False, verbose=0)
    for one, other in zip(restored.weights, model.weights, strict=True):
        np.testing.assert_allclose(
            to_numpy(one).astype("float64"),
            to_numpy(other).astype("float64"),
            rtol=1e-3,
            atol=1e-4,
        )


def test_expanded_codes_of_a_document_are_those_of_its_row_alone():
    x = inputs()
    layer = VQAttention(2, 4, num_codes=4, window=3, order=2, rank=2, seed=3)
    expected = [to_numpy(layer(part, part)) for part in (x[:, :13], x[:, 13:])]
    ids = np.repeat([[0] * 13 + [1] * 7], len(x), axis=0).astype("int32")
    received = to_numpy(layer(x, x, document_ids=ids))
    np.testing.assert_allclose(
        received, np.concatenate(expected, axis=1), rtol=1e-4, atol=1e-5
    )


class Checkpointed(keras.layers.Layer):
    """A block around the layer, with or without `keras.remat`."""

    def __init__(self, remat, **options):
        super().__init__()
        self.remat = remat
        self.inner = make(**options)

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, x, training=None):
        def block(x):
            return x + 3.0 * self.inner(x, x, training=training)

        return keras.remat(block)(x) if self.remat else block(x)


def test_checkpointing_a_block_around_the_layer_changes_nothing(backend):
    """Codes, gradients and the random keys of later calls stay the same."""
    if backend == "jax":
        pytest.skip("keras.remat hands out no state on JAX, of any layer")
    x = inputs()
    # TensorFlow has no gradients of losses that are added inside keras.remat.
    weight = 0.0 if backend == "tensorflow" else 0.5
    after = []
    for remat in (False, True):
        keras.utils.set_random_seed(0)
        block = Checkpointed(remat, revive_after=1, commitment_weight=weight)
        sequence = keras.Input((20, DIM))
        model = keras.Model(sequence, block(sequence))
        model.compile(keras.optimizers.SGD(0.3), "mse", jit_compile=False)
        for _ in range(2):
            model.train_on_batch(x, x)
        after.append([to_numpy(w).astype("float64") for w in model.weights])
        count = weights(block.inner)["count"]
        np.testing.assert_allclose(count.sum(), 2 * (5 + (40 - 5) * 0.0199), rtol=1e-3)
    for plain, checkpointed in zip(*after, strict=True):
        np.testing.assert_allclose(checkpointed, plain, rtol=1e-5, atol=1e-6)


def test_checkpointing_a_stateless_call_changes_nothing_on_jax(backend):
    if backend != "jax":
        pytest.skip("jax.checkpoint")
    import jax

    layer, x = built(revive_after=1), inputs()

    def loss(trainable, others):
        output, others = layer.stateless_call(trainable, others, x, x, training=True)
        return (output**2).sum(), others

    results = []
    for function in (loss, jax.checkpoint(loss)):
        state = [[v.value for v in layer.trainable_variables]]
        state.append([v.value for v in layer.non_trainable_variables])
        results.append(jax.jit(jax.value_and_grad(function, has_aux=True))(*state))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_two_replicas_learn_as_one():
    flags = "--xla_force_host_platform_device_count=2"
    subprocess.run(
        [sys.executable, "-m", "tests.layers.attention.replicas"],
        env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"},
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        timeout=120,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_a_training_call_are_those_of_its_output(causal):
    """The codes move in each call and are drawn in the first."""
    layer, x = built(momentum=0.5, output_shape=HEADS * KEY_DIM), inputs()
    dim = HEADS * KEY_DIM
    identity = np.eye(dim).reshape(HEADS, KEY_DIM, dim)
    layer.output_dense.set_weights([identity, np.zeros(dim)])
    for _ in range(2):
        output, scores = layer(
            x, x, use_causal_mask=causal, return_attention_scores=True, training=True
        )
        kernel, bias = layer.value_dense.get_weights()
        value = np.einsum("btd,dhk->bthk", x, kernel) + bias
        heads = np.einsum("bhts,bshk->bthk", to_numpy(scores), value)
        np.testing.assert_allclose(
            to_numpy(output), heads.reshape(output.shape), rtol=1e-4, atol=1e-5
        )


def test_calibrated_codes_stand_for_trained_keys():
    """With as many codes as keys, k-means is exact, and so is the attention."""
    theirs, x = keras.layers.MultiHeadAttention(HEADS, KEY_DIM), inputs(length=12)
    expected = to_numpy(theirs(x, x))
    for assignment in ("hard", "soft"):
        options = {"sigma": 1e-3} if assignment == "soft" else {}
        layer = built(
            num_codes=24, window=2, qk_norm=False, assignment=assignment, **options
        )
        layer.set_weights(theirs.get_weights())
        before = np.abs(to_numpy(layer(x, x)) - expected).max()
        error = layer.calibrate([x[:1], x[1:]])
        assert error.shape == (HEADS,) and error.max() < 1e-3
        output = to_numpy(layer(x, x))
        np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)
        assert before > 1e-2


def second_moments(x):
    return np.einsum("nhd,nhe->hde", x, x) / len(x)


@pytest.mark.parametrize("assignment", ["hard", "soft"])
def test_calibration_reads_no_padding_and_reports_its_error(assignment):
    layer = built(num_codes=3, qk_norm=False, assignment=assignment)
    x, others = inputs(), inputs(length=30, seed=3)
    mask = np.arange(20)[None] < np.array([[20], [7]])
    padded = np.where(mask[..., None], x, 1e6)
    query = None if assignment == "soft" else iter([others[:1], others[1:]])
    error = layer.calibrate([(padded, mask)], query)
    key, codes = keys(layer, x)[mask], to_numpy(layer.codebook).astype("float64")
    if assignment == "hard":
        kernel, bias = (w.astype("float64") for w in layer.query_dense.get_weights())
        query = (np.einsum("btd,dhk->bthk", others, kernel) + bias) * KEY_DIM**-0.25
        query_map, key_map = (
            to_numpy(w).astype("float64") for w in layer._coordinates.weights
        )
        # Products stay, and keys get the norms that the queries see.
        identity = query_map @ np.swapaxes(key_map, 1, 2)
        np.testing.assert_allclose(
            identity, np.broadcast_to(np.eye(KEY_DIM), identity.shape), atol=1e-5
        )
        metric = second_moments(query.reshape(-1, HEADS, KEY_DIM))
        metric *= KEY_DIM / np.trace(metric, axis1=1, axis2=2)[:, None, None]
        np.testing.assert_allclose(
            key_map @ np.swapaxes(key_map, 1, 2), metric, rtol=1e-3, atol=1e-3
        )
        key, codes = np.einsum("nhd,hde->nhe", key, key_map), codes @ key_map
    residual = np.zeros_like(key)
    for head in range(HEADS):
        distance = ((key[:, head, None] - codes[head][None]) ** 2).sum(-1)
        relative = np.sqrt(distance.min(1).sum() / (key[:, head] ** 2).sum())
        np.testing.assert_allclose(error[head], relative, rtol=1e-3)
        residual[:, head] = key[:, head] - codes[head, distance.argmin(1)]
        # When k-means has converged, each code is the mean of its keys.
        for code in range(3):
            members = key[distance.argmin(1) == code, head]
            np.testing.assert_allclose(codes[head, code], members.mean(0), atol=1e-4)
    if assignment == "hard":
        # The residuals of keys are uncorrelated, the largest coordinates first.
        covariance = second_moments(residual)
        variance = np.diagonal(covariance, axis1=1, axis2=2)
        assert np.all(np.diff(variance) <= 1e-5)
        np.testing.assert_allclose(
            covariance, variance[:, None] * np.eye(KEY_DIM), atol=1e-4
        )


def test_calibrated_mixtures_are_where_expectation_maximisation_ends():
    """Each code is the mean of its keys weighted by shares; so are width and weight."""
    layer = built(
        num_codes=3,
        qk_norm=False,
        assignment="soft",
        learn_sigma=True,
        learn_weights=True,
    )
    x = inputs()
    layer.calibrate(x, iterations=300)
    key, found = keys(layer, x).reshape(-1, HEADS, KEY_DIM), weights(layer)
    squared = ((key[:, :, None] - found["codes"]) ** 2).sum(-1)
    sigma = np.exp(found["log_sigma"])
    joint = np.exp(found["log_weights"] - squared / (2 * sigma**2)) / sigma**KEY_DIM
    share = joint / joint.sum(-1, keepdims=True)
    counts = share.sum(0)
    means = np.einsum("nhc,nhd->hcd", share, key) / counts[..., None]
    np.testing.assert_allclose(means, found["codes"], atol=1e-2)
    variance = (share * squared).sum(0) / counts / KEY_DIM
    np.testing.assert_allclose(sigma**2, variance, rtol=2e-2)
    shares = counts / counts.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.exp(found["log_weights"]), shares, atol=1e-2)


def test_calibration_without_data_is_refused():
    layer, x = built(), inputs()
    with pytest.raises(ValueError, match="built=False"):
        make().calibrate(x)
    with pytest.raises(ValueError, match="at least one finite key"):
        layer.calibrate([(x, np.zeros(x.shape[:2], bool))])
    with pytest.raises(ValueError, match="at least one finite query"):
        layer.calibrate(x, query=[])
    with pytest.raises(ValueError, match=r"mask of shape \(2, 3\)"):
        layer.calibrate([(x, np.ones((2, 3), bool))])


@pytest.mark.parametrize(
    ("causal", "options"),
    [
        (True, dict(window=4, quantize_window=True, rotary_wavelength=50.0)),
        (True, dict(window=4, quantize_window=True, gradient_through_cache=False)),
        (False, dict(window=4, assignment="soft", relative_positions=True)),
        (True, dict(window=4, order=2, rank=2, relative_positions=True)),
        (True, dict(window=None, order=2, rotary_wavelength=50.0)),
        (False, dict(window=4, order=2, rank=3)),
    ],
    ids=str,
)
def test_configurations_outside_the_contract(causal, options):
    layer, x = built(**options), inputs()
    for name in ("content_bias", "position_bias"):
        for weight in layer.weights:
            if weight.name == name:
                weight.assign(np.random.default_rng(3).normal(size=weight.shape))
    if layer.codes.assignment == "hard":
        random_maps(layer)
    output = to_numpy(layer(x, x, use_causal_mask=causal))
    expected, _ = dense.layer_output(layer, dense.vq_heads, x, x, causal=causal)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    if causal:
        streamed, _ = stream(layer, x, (1, 19))
        np.testing.assert_allclose(streamed, expected, rtol=1e-4, atol=1e-5)


WRONG = [
    (dict(num_codes=0), "num_codes=0"),
    (dict(window=0), "window=0"),
    (dict(qk_norm="no"), "qk_norm='no'"),
    (dict(quantize_window=1), "quantize_window=1"),
    (dict(gradient_through_cache=None), "gradient_through_cache=None"),
    (dict(relative_positions="shared"), "relative_positions='shared'"),
    (dict(assignment="soft", learn_sigma="yes"), "learn_sigma='yes'"),
    (dict(assignment="soft", learn_weights=1), "learn_weights=1"),
    (dict(learn_weights=True), "`learn_weights` does not apply"),
    (dict(block_length=1.5), "block_length=1.5"),
    (dict(assignment="fuzzy"), "assignment='fuzzy'"),
    (dict(sigma=2.0), "`sigma` does not apply"),
    (dict(assignment="soft", momentum=0.5), "`momentum` does not apply"),
    (dict(assignment="soft", quantize_window=True), "needs hard codes"),
    (dict(assignment="soft", sigma=0.0), "sigma=0.0"),
    (dict(assignment="soft", init="first_batch"), "first_batch"),
    (dict(init="zeros"), "init='zeros'"),
    (dict(momentum=1.0), "momentum=1.0"),
    (dict(commitment_weight=-1.0), "commitment_weight=-1.0"),
    (dict(revive_after=0), "revive_after=0"),
    (dict(quantize_window=True, window=None), "window=None"),
    (dict(window=None, relative_positions=True), "window=None"),
    (dict(rotary_wavelength=-1.0), "rotary_wavelength=-1.0"),
    (dict(order=1), "order=1"),
    (dict(rank=2), "order=0"),
    (dict(order=2, rank=KEY_DIM + 1), "rank=5"),
    (dict(order=2, assignment="soft"), "`order=2`.*soft=True"),
    (dict(order=2, quantize_window=True), "`order=2` needs hard codes"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_soft_codes_keep_no_statistics():
    with pytest.raises(ValueError, match="codes='soft'"):
        built(assignment="soft").codebook_usage()
