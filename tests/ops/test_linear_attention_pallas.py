"""The kernels for TPUs, as Pallas interprets them and as they are lowered for a TPU."""

import dataclasses
import functools

import keras
import numpy as np
import pytest

from keras_efficient_attn.ops import linear_attention, linear_attention_state
from keras_efficient_attn.ops.linear_attention import feature_maps
from keras_efficient_attn.ops.linear_attention.api import mapped_linear_attention
from keras_efficient_attn.ops.linear_attention.config import (
    LinearAttentionConfig,
)
from keras_efficient_attn.ops.linear_attention.reference import reference_attention

if keras.backend.backend() != "jax":
    pytest.skip("Pallas is JAX's", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from keras_efficient_attn.ops.linear_attention.kernels import pallas

STATE_NAMES = ("sum", "normalizer", "log_scale")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: which map, which options, and the shapes of random tensors."""

    map: object = feature_maps.elu_features
    rows: int = 0
    causal: bool = True
    output: str = "normalized"
    masked: bool = False
    weighted: bool = False
    with_state: bool = False
    rowwise: bool = True
    length: int = 150
    key_length: int | None = None
    dims: tuple = (8, 5)
    dtype: str = "float32"

    @property
    def num_features(self):
        return self.rows or self.dims[0]

    def draw(self):
        """Arrays by name, of which the mask alone is not differentiated."""
        random = np.random.default_rng(0)
        batch, heads = 2, 2
        dim, value_dim = self.dims
        key_length = self.key_length or self.length

        def normal(*shape):
            return random.normal(size=shape).astype("float32")

        arrays = {
            "query": normal(batch, self.length, heads, dim),
            "key": normal(batch, key_length, heads, dim),
            "value": normal(batch, key_length, heads, value_dim),
        }
        mask = None
        if self.rows:
            arrays["projection"] = normal(self.rows, dim)
        if self.weighted:
            arrays["log_weight"] = 3 * normal(batch, key_length, heads)
            arrays["log_weight"][:, 3:9] = -np.inf
        if self.masked:
            mask = random.random((batch, key_length)) > 0.3
            mask[:, :2] = False
        if self.with_state:
            sizes = batch, heads, self.num_features
            arrays["sum"] = normal(*sizes, value_dim)
            arrays["normalizer"] = 1 + np.abs(normal(*sizes))
            arrays["log_scale"] = normal(batch, heads)
        return arrays, mask

    def fast(self, arrays, mask, implementation="pallas"):
        config = LinearAttentionConfig(
            self.map,
            self.map,
            self.num_features,
            causal=self.causal,
            output=self.output,
            implementation=implementation,
            rowwise_maps=self.rowwise,
        )
        state = None
        if self.with_state:
            state = {name: arrays[name] for name in STATE_NAMES}
        outputs, state = mapped_linear_attention(
            *(arrays[name].astype(self.dtype) for name in ("query", "key", "value")),
            config,
            map_weights=(arrays["projection"],) if self.rows else (),
            key_log_weight=arrays.get("log_weight"),
            key_mask=mask,
            state=state,
        )
        if self.output == "partial":
            values, totals, scale = outputs
            factor = jnp.exp(scale)
            outputs = values * factor[..., None], totals * factor
        if state is not None:
            factor = jnp.exp(state["log_scale"])
            outputs += (
                state["sum"] * factor[..., None, None],
                state["normalizer"] * factor[..., None],
            )
        return outputs

    def definition(self, arrays, mask):
        """By the reference, in the dtype of the arrays."""
        query, query_scale = self._features(arrays["query"], arrays)
        key, log_weight = self._features(arrays["key"], arrays)
        value = arrays["value"]
        log_weight = jnp.zeros(key.shape[:3]) if log_weight is None else log_weight
        if "log_weight" in arrays:
            log_weight = log_weight + arrays["log_weight"]
        if query_scale is not None:
            query = query * jnp.exp(query_scale)[..., None]
        mask = jnp.ones(key.shape[:2], bool) if mask is None else mask
        past = 0
        if self.with_state:
            # As many keys as features, of which each makes one row of the state.
            past = self.num_features
            rows = arrays["normalizer"][..., None] * jnp.eye(past)
            earlier = arrays["sum"] / arrays["normalizer"][..., None]
            scale = jnp.repeat(arrays["log_scale"][:, None], past, axis=1)
            key = jnp.concatenate([jnp.swapaxes(rows, 1, 2), key], axis=1)
            value = jnp.concatenate([jnp.swapaxes(earlier, 1, 2), value], axis=1)
            log_weight = jnp.concatenate([scale, log_weight], axis=1)
            mask = jnp.pad(mask, ((0, 0), (past, 0)), constant_values=True)
            query = jnp.pad(query, ((0, 0), (past, 0), (0, 0), (0, 0)))

        def attend(query, value):
            inputs = query, key, value, mask
            normalize = self.output == "normalized"
            return reference_attention(inputs, log_weight, self.causal, normalize)

        outputs = (attend(query, value)[:, past:],)
        if self.output == "partial":
            outputs += (attend(query, jnp.ones_like(value[..., :1]))[:, past:, :, 0],)
        if self.with_state:
            weights = jnp.where(mask[..., None], jnp.exp(log_weight), 0.0)
            key = key * weights[..., None]
            outputs += jnp.einsum("bshm,bshv->bhmv", key, value), key.sum(1)
        return outputs

    def _features(self, x, arrays):
        weights = (arrays["projection"],) if self.rows else ()
        return self.map(x, *weights)


favor = functools.partial(Case, feature_maps.positive_random_features, rows=24)
CASES = {
    "elu": Case(length=300, masked=True, dims=(8, 5)),
    "elu-state": Case(weighted=True, masked=True, with_state=True, length=300),
    "elu-state-alone": Case(with_state=True, length=128, output="sum"),
    "relu-sum": Case(feature_maps.relu_features, output="sum", length=130),
    "favor-partial": favor(masked=True, output="partial", length=400),
    "exp-outside": Case(
        feature_maps.exponential_features, rowwise=False, masked=True, output="sum"
    ),
    "lanes": Case(dims=(128, 128), length=256, weighted=True),
    "shorter-keys": Case(length=140, key_length=90, dims=(64, 16)),
    "full-elu": Case(causal=False, key_length=300, dims=(128, 8), masked=True),
    "full-favor": favor(causal=False, weighted=True, output="partial", masked=True),
    "full-sum": Case(causal=False, output="sum", length=30, key_length=140),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Two chunks to a program, so that short sequences need several."""
    monkeypatch.setattr(pallas, "BLOCK", 256)


def weighed_sum(outputs):
    def weigh(x):
        weights = np.sin(np.arange(x.size, dtype="float32")).reshape(x.shape)
        return jnp.sum(weights * x)

    return sum(map(weigh, outputs))


def outputs_and_gradients(function, arrays):
    def loss(arrays):
        outputs = function(arrays)
        return weighed_sum(outputs), outputs

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    gradients.pop("log_scale", None)
    return {**gradients, **{str(i): x for i, x in enumerate(outputs)}}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_the_reference(case):
    arrays, mask = case.draw()
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, "float64") for name, x in arrays.items()}
        correct = outputs_and_gradients(lambda x: case.definition(x, mask), wide)
        correct = jax.tree.map(np.asarray, correct)
        assert correct["0"].dtype == "float64"
    if mask is not None:
        for name in ("key", "value"):
            arrays[name][~mask] = np.nan
    received = outputs_and_gradients(lambda x: case.fast(x, mask), arrays)
    assert set(received) == set(correct)
    for name, expected in correct.items():
        limit = 2e-5 * np.abs(expected).max()
        np.testing.assert_allclose(
            received[name], expected, atol=limit, rtol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("case", [Case(length=300), favor(causal=False, length=100)])
def test_bfloat16_is_added_up_in_float32(case):
    case = dataclasses.replace(case, dtype="bfloat16")
    arrays, _ = case.draw()
    for name in ("query", "key", "value"):
        arrays[name] = np.asarray(jnp.asarray(arrays[name], "bfloat16"), "float32")
    correct = outputs_and_gradients(lambda x: case.definition(x, None), arrays)
    received = outputs_and_gradients(lambda x: case.fast(x, None), arrays)
    assert received["0"].dtype == "bfloat16"
    for name, expected in correct.items():
        error = np.asarray(received[name], "float32") - expected
        assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.01, name


def test_the_past_does_not_depend_on_the_future():
    case = favor(length=300)
    arrays, _ = case.draw()
    attend = jax.jit(lambda x: case.fast(x, None)[0])
    first = attend(arrays)
    for name in ("query", "key", "value"):
        arrays[name][:, 200:] = 1e3 * arrays[name][:, 200:] + 1
    second = attend(arrays)
    np.testing.assert_array_equal(first[:, :200], second[:, :200])
    assert np.all(first[:, 200:] != second[:, 200:])


@pytest.mark.parametrize(
    "case",
    [
        favor(length=150, dims=(4, 3), masked=True, with_state=True, output="partial"),
        favor(length=150, dims=(4, 3), causal=False, output="partial"),
    ],
    ids=["causal", "full"],
)
def test_no_memory_is_read_that_was_not_written(case, monkeypatch):
    monkeypatch.setattr(pallas, "BLOCK", 128)
    arrays, mask = case.draw()
    expected = outputs_and_gradients(lambda x: case.definition(x, mask), arrays)
    poison = pltpu.InterpretParams(uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(poison):
        received = outputs_and_gradients(lambda x: case.fast(x, mask), arrays)
    for name, correct in expected.items():
        limit = 1e-4 * np.abs(correct).max()
        np.testing.assert_allclose(received[name], correct, atol=limit, err_msg=name)


LOWERED = {
    "elu": Case(dims=(128, 128), length=8192, dtype="bfloat16"),
    "favor": favor(rows=622, dims=(128, 128), masked=True, length=1000),
    "state": Case(dims=(64, 40), with_state=True, weighted=True, output="partial"),
    "full": favor(rows=256, dims=(64, 64), causal=False, masked=True, length=700),
}


@pytest.mark.parametrize("case", LOWERED.values(), ids=LOWERED)
def test_kernels_and_their_gradients_are_lowered_for_a_tpu(case):
    arrays, mask = case.draw()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)

    def gradients(arrays):
        return jax.value_and_grad(lambda x: weighed_sum(case.fast(x, mask)))(arrays)

    exported = jax.export.export(jax.jit(gradients), platforms=["tpu"])(shapes)
    kernels = exported.mlir_module().count("@tpu_custom_call")
    assert kernels == (3 if case.causal else 4)


def test_one_position_and_a_state_need_no_kernel():
    case = Case(length=1, with_state=True)
    arrays, _ = case.draw()
    jaxpr = str(jax.make_jaxpr(lambda x: case.fast(x, None))(arrays))
    assert "pallas_call" not in jaxpr
    longer = dataclasses.replace(case, length=2).draw()[0]
    jaxpr = str(jax.make_jaxpr(lambda x: case.fast(x, None))(longer))
    assert "pallas_call" in jaxpr


def test_without_a_tpu_chunks_are_chosen():
    arrays = Case().draw()[0]
    x = arrays["query"]
    jaxpr = str(jax.make_jaxpr(lambda x: linear_attention(x, x, x))(x))
    assert "pallas_call" not in jaxpr


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 4, 2, 8), "float16", "Received: float16"),
        ((1, 4, 2, 1025), "float32", "at most 512"),
        ((0, 4, 2, 8), "float32", "needs a batch"),
    ],
)
def test_errors(shape, dtype, message):
    x = jnp.ones(shape, dtype)
    with pytest.raises(ValueError, match=message):
        linear_attention(x, x, x, implementation="pallas")


def test_a_size_of_chunks_is_not_the_kernels():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="Received: chunk_size=2"):
        linear_attention(x, x, x, chunk_size=2, implementation="pallas")


def test_sizes_have_to_be_known():
    (length,) = jax.export.symbolic_shape("length")
    x = jax.ShapeDtypeStruct((1, length, 2, 8), "float32")

    def attend(x):
        return linear_attention(x, x, x, causal=True, implementation="pallas")

    with pytest.raises(ValueError, match="sizes that are known"):
        jax.export.export(jax.jit(attend))(x)


def test_float64_has_no_kernel():
    with jax.enable_x64(True):
        x = jnp.ones((1, 4, 2, 8), "float64")
        with pytest.raises(ValueError, match="Received: float64"):
            linear_attention(x, x, x, implementation="pallas")


def test_a_state_goes_through_the_operation():
    x = np.random.default_rng(0).gamma(1.0, size=(1, 40, 2, 8)).astype("float32")
    state = linear_attention_state(1, 2, 8, 8)
    outputs = []
    for part in (x[:, :25], x[:, 25:]):
        output, state = linear_attention(
            part, part, part, causal=True, state=state, implementation="pallas"
        )
        outputs.append(output)
    expected = linear_attention(x, x, x, causal=True, implementation="reference")
    np.testing.assert_allclose(
        np.concatenate(outputs, axis=1), expected, rtol=1e-5, atol=1e-5
    )
