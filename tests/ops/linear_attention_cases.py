"""Test calls of causal linear attention for kernels, and their definition."""

import dataclasses
import functools

import numpy as np
from keras import ops

from keras_efficient_attn.ops import linear_attention, linear_attention_state
from keras_efficient_attn.ops.common.feature_kernels import entrywise
from keras_efficient_attn.ops.common.feature_kernels.choice import (
    LinearAttentionConfig,
)
from keras_efficient_attn.ops.linear_attention import feature_maps
from keras_efficient_attn.ops.linear_attention.api import (
    linear_attention_with_feature_maps,
)
from keras_efficient_attn.ops.linear_attention.reference import reference_attention
from tests import dense
from tests.autodiff import to_numpy
from tests.ops.pieces import read_in_pieces

STATE_NAMES = ("sum", "normalizer", "log_scale")
ENTRYWISE = {
    feature_maps.elu_features: entrywise.elu_entries,
    feature_maps.relu_features: entrywise.relu_entries,
    feature_maps.exponential_features: entrywise.exponential_entries,
    feature_maps.positive_random_features: entrywise.positive_random_entries,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: feature map, options, and shapes of random tensors."""

    map: object = feature_maps.elu_features
    rows: int = 0
    output: str = "normalized"
    masked: bool = False
    weighted: bool = False
    with_state: bool = False
    rowwise: bool = True
    length: int = 150
    key_length: int | None = None
    dims: tuple = (8, 5)
    dtype: str = "float32"
    batch: int = 2
    heads: int = 2

    @property
    def num_features(self):
        return self.rows or self.dims[0]

    def draw(self):
        """Arrays by name; all except the mask are differentiated."""
        random = np.random.default_rng(0)
        batch, heads = self.batch, self.heads
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

    def fast(self, arrays, mask, implementation):
        config = LinearAttentionConfig(
            self.map,
            self.map,
            self.num_features,
            causal=True,
            output=self.output,
            implementation=implementation,
            rowwise_maps=self.rowwise,
            entrywise=ENTRYWISE[self.map] if self.rowwise else None,
        )
        state = None
        if self.with_state:
            state = {name: arrays[name] for name in STATE_NAMES}
        names = "query", "key", "value"
        outputs, state = linear_attention_with_feature_maps(
            [ops.cast(arrays[name], self.dtype) for name in names],
            config,
            map_weights=(arrays["projection"],) if self.rows else (),
            key_log_weight=arrays.get("log_weight"),
            key_mask=mask,
            state=state,
        )
        if self.output == "partial":
            values, totals, scale = outputs
            factor = ops.exp(scale)
            outputs = values * factor[..., None], totals * factor
        if state is not None:
            factor = ops.exp(state["log_scale"])
            outputs += (
                state["sum"] * factor[..., None, None],
                state["normalizer"] * factor[..., None],
            )
        return outputs

    def definition(self, arrays, mask):
        """The result of the reference, in the dtype of the arrays."""
        query, query_scale = self._features(arrays["query"], arrays)
        key, log_weight = self._features(arrays["key"], arrays)
        value = arrays["value"]
        if log_weight is None:
            log_weight = ops.zeros(key.shape[:3], key.dtype)
        if "log_weight" in arrays:
            log_weight = log_weight + arrays["log_weight"]
        if query_scale is not None:
            query = query * ops.exp(query_scale)[..., None]
        mask = np.ones(key.shape[:2], bool) if mask is None else mask
        past = 0
        if self.with_state:
            # As many keys as features; each key writes one row of the state.
            past = self.num_features
            rows = arrays["normalizer"][..., None] * ops.eye(past, dtype=key.dtype)
            earlier = arrays["sum"] / arrays["normalizer"][..., None]
            scale = ops.repeat(arrays["log_scale"][:, None], past, axis=1)
            key = ops.concatenate([ops.swapaxes(rows, 1, 2), key], axis=1)
            value = ops.concatenate([ops.swapaxes(earlier, 1, 2), value], axis=1)
            log_weight = ops.concatenate([scale, log_weight], axis=1)
            mask = np.pad(mask, ((0, 0), (past, 0)), constant_values=True)
            query = ops.pad(query, ((0, 0), (past, 0), (0, 0), (0, 0)))

        def attend(query, value):
            inputs = query, key, value, mask
            normalize = self.output == "normalized"
            return reference_attention(inputs, log_weight, True, normalize)

        outputs = (attend(query, value)[:, past:],)
        if self.output == "partial":
            outputs += (attend(query, ops.ones_like(value[..., :1]))[:, past:, :, 0],)
        if self.with_state:
            weights = ops.where(mask[..., None], ops.exp(log_weight), 0.0)
            key = key * weights[..., None]
            outputs += ops.einsum("bshm,bshv->bhmv", key, value), ops.sum(key, axis=1)
        return outputs

    def _features(self, x, arrays):
        weights = (arrays["projection"],) if self.rows else ()
        return self.map(x, *weights)


favor = functools.partial(Case, feature_maps.positive_random_features, rows=24)
CASES = {
    "elu": Case(length=300, masked=True, dims=(16, 5)),
    "elu-state": Case(weighted=True, masked=True, with_state=True, length=300),
    "elu-state-alone": Case(with_state=True, length=128, output="sum"),
    "relu-sum": Case(
        feature_maps.relu_features, output="sum", length=130, key_length=200
    ),
    "favor-partial": favor(masked=True, weighted=True, output="partial", length=400),
    "exp-outside": Case(
        feature_maps.exponential_features, rowwise=False, masked=True, output="sum"
    ),
    "lanes": Case(dims=(128, 128), length=256, weighted=True),
    "shorter-keys": Case(length=140, key_length=90, dims=(64, 16)),
}


def weighed_sum(outputs):
    """A scalar function of all outputs, to differentiate."""

    def weigh(x):
        shape = tuple(x.shape)
        weights = np.sin(np.arange(np.prod(shape), dtype="float32")).reshape(shape)
        return ops.sum(ops.cast(weights, x.dtype) * x)

    return sum(map(weigh, outputs))


def with_gradients(function):
    """`function` of named arrays and its gradients, but the log scale's, by JAX."""
    import jax

    def loss(arrays):
        outputs = function(arrays)
        return weighed_sum(outputs), outputs

    @jax.jit
    def compute(arrays):
        gradients, outputs = jax.grad(loss, has_aux=True)(arrays)
        gradients.pop("log_scale", None)
        return {**gradients, **{str(i): x for i, x in enumerate(outputs)}}

    return compute


def assert_close(received, correct):
    """Outputs and gradients by name, against those of the definition."""
    assert set(received) == set(correct)
    for name, expected in correct.items():
        expected = to_numpy(expected)
        limit = 2e-5 * np.abs(expected).max()
        np.testing.assert_allclose(
            to_numpy(received[name]), expected, atol=limit, rtol=1e-4, err_msg=name
        )


def check_pieces(implementation):
    """Reads a sequence in two pieces by the public operation."""
    x = np.random.default_rng(0).gamma(1.0, size=(1, 40, 2, 8)).astype("float32")
    options = dict(causal=True, implementation=implementation)

    def attend(x, state):
        return linear_attention(x, x, x, state=state, **options)

    state = linear_attention_state(1, 2, 8, 8)
    output, _ = read_in_pieces(attend, state, [x], (25, 15))
    correct, _ = dense.weigh(dense.dots(x, x), x, causal=True)
    np.testing.assert_allclose(output, correct, rtol=1e-5, atol=1e-5)
