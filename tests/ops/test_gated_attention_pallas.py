"""Decays and corrections in kernels for TPUs, interpreted and lowered for a TPU."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.ops import linear_attention
from keras_efficient_attn.ops.common.plan import plan_for
from tests.ops.linear_attention_cases import assert_close, weighed_sum, with_gradients
from tests.ops.test_gated_attention import RULES, STRENGTHS, draw, recurrence

if keras.backend.backend() != "jax":
    pytest.skip("Pallas is JAX's", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.common.feature_kernels.choice import (
    LinearAttentionConfig,
    given_features,
)
from keras_efficient_attn.ops.linear_attention.feature_maps import (
    elu_features,
    unit_features,
)
from keras_efficient_attn.ops.linear_attention.gated import pallas
from keras_efficient_attn.ops.linear_attention.gated.api import (
    gated_attention_with_feature_maps,
)

NAMES = "query", "key", "value", "log_decay", "beta"


@pytest.fixture
def small_chunks(monkeypatch):
    """Two chunks per program, so that short sequences need several programs."""
    monkeypatch.setattr(pallas, "CHUNK", 8)
    monkeypatch.setattr(pallas, "CHUNKS", 2)


def draw_arrays(rule, length, with_state=False):
    """Arrays by name, and a mask; the state is positive, as normalizers need."""
    arrays = dict(zip(NAMES, draw(rule, length), strict=True))
    arrays = {name: x for name, x in arrays.items() if x is not None}
    random = np.random.default_rng(4)
    if with_state:
        sizes = *arrays["query"].shape[::2], arrays["query"].shape[3]
        arrays["sum"] = random.normal(size=(*sizes, arrays["value"].shape[3]))
        arrays["normalizer"] = 1 + random.random(sizes)
        arrays = {name: x.astype("float32") for name, x in arrays.items()}
    return arrays, random.random(arrays["key"].shape[:2]) > 0.3


def attend(arrays, mask=None, normalize=False):
    """By the kernels: `(output,)`, or `(output, sum, normalizer)` with a state."""
    state = None
    if "sum" in arrays:
        state = {name: arrays[name] for name in ("sum", "normalizer")}
        state["log_scale"] = jnp.zeros(arrays["sum"].shape[:2])
    output = linear_attention(
        *(arrays[name] for name in NAMES[:3]),
        **{name: arrays[name] for name in NAMES[3:] if name in arrays},
        key_mask=mask,
        causal=True,
        state=state,
        normalize=normalize,
        implementation="pallas",
    )
    if state is None:
        return (output,)
    output, state = output
    factor = jnp.exp(state["log_scale"])[..., None]
    sums = state["sum"] * factor[..., None], state["normalizer"] * factor
    return output, *sums[: 1 + normalize]


def definition(arrays, mask=None, normalize=False):
    """The recurrence, position by position, in the dtype of the arrays."""
    query, key, value = (arrays[name] for name in NAMES[:3])
    if mask is None:
        mask = np.ones(key.shape[:2], bool)
    log_decay = arrays.get("log_decay", jnp.zeros(key.shape[:3], key.dtype))
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    ones = jnp.ones((*value.shape[:3], int(normalize)), value.dtype)
    value = jnp.concatenate([value, ones], axis=-1)
    state = jnp.zeros((*key.shape[::2], key.shape[3], value.shape[3]), value.dtype)
    if "sum" in arrays:
        parts = [arrays["sum"], arrays["normalizer"][..., None]]
        state = jnp.concatenate(parts[: 1 + normalize], axis=-1)
    beta = arrays.get("beta", jnp.ones(key.shape[:3], key.dtype))

    def step(state, x):
        query, key, value, log_decay, beta, kept = x
        moved = jnp.exp(log_decay)[..., None] * state
        if "beta" in arrays:
            value = value - jnp.einsum("bhf,bhfv->bhv", key, moved)
        moved += jnp.einsum("bh,bhf,bhv->bhfv", beta, key, value)
        state = jnp.where(kept[:, None, None, None], moved, state)
        return state, jnp.einsum("bhf,bhfv->bhv", query, state)

    xs = query, key, value, log_decay, beta, jnp.asarray(mask)
    xs = [jnp.swapaxes(x, 0, 1) for x in xs]
    state, output = jax.lax.scan(step, state, xs)
    output = jnp.swapaxes(output, 0, 1)
    if normalize:
        totals = output[..., -1:]
        output = output[..., :-1] / jnp.where(totals == 0, 1, totals)
    if "sum" not in arrays:
        return (output,)
    parts = (state[..., :-1], state[..., -1]) if normalize else (state,)
    return output, *parts


# Compiled once for arrays of one shape.
attended = with_gradients(attend)


def exact(arrays, mask=None, normalize=False):
    """The outputs and gradients of the definition, in float64."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, "float64") for name, x in arrays.items()}
        correct = with_gradients(lambda x: definition(x, mask, normalize))(wide)
        assert correct["0"].dtype == "float64"
        return jax.tree.map(np.asarray, correct)


def hide(arrays, mask):
    """Arrays with NaN where the mask hides keys and their rates."""
    hidden = {name: x.copy() for name, x in arrays.items()}
    for name in NAMES[1:]:
        if name in hidden:
            hidden[name][~mask] = np.nan
    return hidden


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_outputs_and_gradients_are_those_of_the_recurrence(rule, small_chunks):
    arrays, mask = draw_arrays(rule, length=30, with_state=True)
    correct = exact(arrays, mask)
    given = hide(arrays, mask)
    assert_close(with_gradients(lambda x: attend(x, mask))(given), correct)


@pytest.mark.parametrize("with_state", [False, True], ids=["alone", "state"])
def test_normalized_outputs_and_their_gradients(with_state, small_chunks):
    arrays, mask = draw_arrays(("scalar", False), 30, with_state)
    correct = exact(arrays, mask, normalize=True)
    received = with_gradients(lambda x: attend(x, mask, True))(arrays)
    assert_close(received, correct)


def unit_vectors(x):
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-3 * x.shape[-1])


def positive(x):
    return jax.nn.elu(x) + 1


@pytest.mark.parametrize(
    ("query_map", "key_map", "formulas"),
    [
        (unit_features, unit_features, (unit_vectors, unit_vectors)),
        (elu_features, given_features, (positive, lambda x: x)),
    ],
    ids=["unit", "elu and none"],
)
def test_kernels_compute_maps_of_rows(query_map, key_map, formulas, small_chunks):
    arrays, mask = draw_arrays(("scalar", True), 30)
    config = LinearAttentionConfig(
        query_map,
        key_map,
        arrays["query"].shape[3],
        causal=True,
        output="sum",
        implementation="pallas",
        rowwise_maps=True,
    )

    def mapped(arrays):
        names = "query", "key"
        features = {n: f(arrays[n]) for n, f in zip(names, formulas, strict=True)}
        return definition({**arrays, **features}, mask)

    def by_kernel(arrays):
        tensors, rates = ([arrays[n] for n in part] for part in (NAMES[:3], NAMES[3:]))
        output, _ = gated_attention_with_feature_maps(
            tensors, rates, config, key_mask=jnp.asarray(mask)
        )
        return (output,)

    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, "float64") for name, x in arrays.items()}
        correct = with_gradients(mapped)(wide)
    assert_close(with_gradients(by_kernel)(arrays), correct)


@pytest.mark.parametrize("length", [1, 130, 600])
def test_lengths(length):
    arrays, _ = draw_arrays(("scalar", True), length)
    assert_close({"0": attend(arrays)[0]}, {"0": recurrence(*arrays.values())[0]})


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS)
@pytest.mark.parametrize("decays", ["scalar", "vector"])
def test_decays_of_any_strength(decays, strength, small_chunks):
    arrays, _ = draw_arrays((decays, True), length=30)
    arrays["log_decay"] = strength(arrays["log_decay"]).astype("float32")
    correct, _ = recurrence(*arrays.values())
    received = attended(arrays)
    assert_close({"0": received["0"]}, {"0": correct})
    assert all(np.all(np.isfinite(x)) for x in received.values())


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_keys_that_repeat(beta, small_chunks):
    arrays, _ = draw_arrays((None, True), length=30)
    arrays["key"][:] = arrays["key"][:, :1]
    arrays["beta"][:] = beta
    correct, received = exact(arrays), attended(arrays)
    if beta == 0:
        assert np.all(received["0"] == 0)
    for name, expected in correct.items():
        limit = 1e-4 * np.abs(expected).max() + 1e-15
        np.testing.assert_allclose(received[name], expected, atol=limit, err_msg=name)


@pytest.mark.parametrize("rule", [("scalar", True), ("vector", True)], ids=str)
def test_bfloat16_is_added_up_in_float32(rule, small_chunks):
    arrays, _ = draw_arrays(rule, length=30)
    rounded = dict(arrays)
    for name in ("query", "key", "value"):
        rounded[name] = np.asarray(jnp.asarray(arrays[name], "bfloat16"), "float32")
    correct = exact(rounded)

    def of_halves(arrays):
        halves = {name: arrays[name].astype("bfloat16") for name in NAMES[:3]}
        return attend({**arrays, **halves})

    received = with_gradients(of_halves)(rounded)
    assert received["0"].dtype == "bfloat16"
    for name, expected in correct.items():
        error = np.asarray(received[name], "float32") - expected
        assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.02, name


def test_no_memory_is_read_that_was_not_written(small_chunks, monkeypatch):
    monkeypatch.setattr(pallas, "CHUNKS", 1)
    arrays, mask = draw_arrays(("scalar", True), 12, with_state=True)
    arrays, mask = {name: x[:1] for name, x in arrays.items()}, mask[:1]
    correct = exact(arrays, mask)
    poison = pltpu.InterpretParams(uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(poison):
        received = with_gradients(lambda x: attend(x, mask))(arrays)
    assert_close(received, correct)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_kernels_and_their_gradients_are_lowered_for_a_tpu(rule):
    arrays, mask = draw_arrays(rule, length=1000)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    gradients = jax.jit(jax.grad(lambda x: weighed_sum(attend(x, mask))))
    exported = jax.export.export(gradients, platforms=["tpu"])(shapes)
    # The outputs are not needed for the gradients of their sum.
    assert exported.mlir_module().count("@tpu_custom_call") == 2


def test_one_tpu_has_the_kernel(monkeypatch):
    arrays, _ = draw_arrays(("scalar", True), length=20)
    tensors = [arrays[name] for name in NAMES[:3]]
    rates = {name: arrays[name] for name in NAMES[3:]}

    def program(**options):
        def attend(tensors, rates):
            return linear_attention(*tensors, **rates, causal=True, **options)

        return str(jax.make_jaxpr(attend)(tensors, rates))

    assert "pallas_call" not in program()
    with plan_for("tpu"):
        assert "pallas_call" in program()
        assert "pallas_call" not in program(chunk_size=4)
        assert "pallas_call" not in program(implementation="chunked")
        monkeypatch.setattr(jax, "device_count", lambda: 2)
        jax.clear_caches()
        assert "pallas_call" not in program()


def test_one_position_and_a_state_need_no_kernel():
    arrays, _ = draw_arrays(("scalar", True), 1, with_state=True)
    assert "pallas_call" not in str(jax.make_jaxpr(attend)(arrays))
    arrays, _ = draw_arrays(("scalar", True), 2, with_state=True)
    assert "pallas_call" in str(jax.make_jaxpr(attend)(arrays))


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "message"),
    [
        ((1, 4, 2, 8), "float16", {}, "Received: float16"),
        ((1, 4, 2, 257), "float32", {}, "at most 256"),
        ((0, 4, 2, 8), "float32", {}, "known in advance"),
        ((1, 4, 2, 8), "float32", {"chunk_size": 2}, "Received: chunk_size=2"),
    ],
    ids=["dtype", "dims", "batch", "chunk_size"],
)
def test_errors(shape, dtype, options, message):
    x, beta = jnp.ones(shape, dtype), jnp.ones(shape[:3])
    options = {"implementation": "pallas", "causal": True, **options}
    with pytest.raises(ValueError, match=message):
        linear_attention(x, x, x, beta=beta, **options)
