"""Public operations on `keras.Input`: nodes of Functional models, as `keras.ops`."""

import keras
import numpy as np
import pytest
from keras import ops as keras_ops

from keras_efficient_attn import ops
from keras_efficient_attn.ops.common.symbolic import FUNCTIONS
from tests.autodiff import to_numpy

BATCH, LENGTH, HEADS, DIM = 2, 12, 2, 4
HEADS_OF = (LENGTH, HEADS, DIM)
QKV = dict.fromkeys(("query", "key", "value"), HEADS_OF)
MAPS = ops.feature_maps
# The function, the shapes of tensors by argument, and its other arguments.
CALLS = {
    "adaptive_computation": (
        ops.adaptive_computation,
        {"state": (DIM,), "running": ()},
        {"step": lambda n, state: (state + 1, 0.4 + 0 * state[:, 0]), "max_steps": 3},
    ),
    "adaptive_span_attention": (
        ops.adaptive_span_attention,
        QKV,
        {"spans": np.array([2.0, 5.0], "float32"), "window": 8, "causal": True},
    ),
    "chunked_cross_entropy": (
        ops.chunked_cross_entropy,
        {"hidden": (LENGTH, DIM)},
        {
            "kernel": np.ones((DIM, 5), "float32"),
            "bias": None,
            "labels": np.ones((BATCH, LENGTH), "int32"),
        },
    ),
    "linear_attention": (
        ops.linear_attention,
        {"query_features": HEADS_OF, "key_features": HEADS_OF, "value": HEADS_OF},
        {"causal": True},
    ),
    "local_attention": (ops.local_attention, QKV, {"window": 4, "causal": True}),
    "lsh_attention": (
        ops.lsh_attention,
        {"query": HEADS_OF, "value": HEADS_OF},
        {
            "buckets": np.zeros((BATCH, HEADS, 1, LENGTH), "int32"),
            "num_buckets": 2,
            "chunk_size": 4,
        },
    ),
    "relative_attention": (
        ops.relative_attention,
        QKV,
        {"position_key": np.ones((LENGTH, HEADS, DIM), "float32"), "causal": True},
    ),
    "sparse_attention": (ops.sparse_attention, QKV, {"stride": 4, "causal": True}),
    "vq_attention": (
        ops.vq_attention,
        QKV,
        {"codebook": np.eye(4, dtype="float32")[None].repeat(HEADS, 0)},
    ),
    "soft_codes": (
        ops.soft_codes,
        {"key": HEADS_OF},
        {"codebook": np.eye(4, dtype="float32")[None].repeat(HEADS, 0)},
    ),
    "fourier_attention": (
        ops.fourier.fourier_attention,
        QKV,
        {"radius": np.ones((HEADS, DIM), "float32")},
    ),
}
ROWS = np.linspace(-1, 1, 6 * DIM, dtype="float32").reshape(6, DIM)
CALLS |= {
    name: (getattr(MAPS, name), {"x": HEADS_OF}, options)
    for name, options in {
        "positive_random_features": {"projection": ROWS},
        "optimal_positive_features": {"projection": ROWS, "shape": -0.1},
        "trigonometric_features": {"projection": ROWS},
        "relu_features": {"projection": ROWS},
        "elu_features": {},
        "unit_features": {},
        "sum_features": {},
        "softmax_query_features": {},
        "exponential_features": {},
        "taylor_features": {},
        "power_features": {},
    }.items()
}
# Features with weights for each head: `(batch, heads, chunks, chunk_size, head_dim)`.
CHUNKS = {"x": (HEADS, 3, 4, DIM)}
KERNEL = np.stack([ROWS.T, -2 * ROWS.T])
CALLS["hedgehog_features"] = (MAPS.hedgehog_features, CHUNKS, {"kernel": KERNEL})
CALLS["learned_exponential_features"] = (
    MAPS.learned_exponential_features,
    CHUNKS,
    {
        "kernel": KERNEL,
        "bias": np.ones((HEADS, 6), "float32"),
        "norm": np.full((HEADS, DIM), 0.5, "float32"),
    },
)
# The axis of the batch is that of the points and samples.
POINTS = {"points": (DIM,), "samples": (DIM,)}
CALLS |= {
    "fourier_density": (ops.fourier.fourier_density, POINTS, {"radius": 2.0}),
    "fourier_regression": (
        ops.fourier.fourier_regression,
        {**POINTS, "targets": (3,)},
        {"radius": np.linspace(1, 2, DIM, dtype="float32"), "power": 2},
    ),
    "gaussian_regression": (
        ops.fourier.gaussian_regression,
        {**POINTS, "targets": (3,)},
        {"sigma": 1.5},
    ),
}
CALLS["optimal_shape"] = (MAPS.optimal_shape, {"query": HEADS_OF, "key": HEADS_OF}, {})
CALLS["squared_features"] = (
    ops.fourier.squared_features,
    {"x": HEADS_OF},
    {"frequencies": ROWS},
)


@pytest.mark.parametrize("name", CALLS)
def test_a_functional_model_gives_the_values_of_the_call(name):
    function, shapes, options = CALLS[name]
    options = {
        n: keras_ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
        for n, x in options.items()
    }
    random = np.random.default_rng(0)
    arrays = {
        argument: np.abs(random.normal(size=(BATCH, *shape))).astype("float32")
        for argument, shape in shapes.items()
    }
    expected = function(
        **{n: keras_ops.convert_to_tensor(x) for n, x in arrays.items()}, **options
    )
    symbols = {n: keras.Input(shape, batch_size=BATCH) for n, shape in shapes.items()}
    received = function(**symbols, **options)
    leaves = [x for x in keras.tree.flatten(expected) if x is not None]
    made = [x for x in keras.tree.flatten(received) if x is not None]
    for symbol, value in zip(made, leaves, strict=True):
        assert isinstance(symbol, keras.KerasTensor)
        assert symbol.shape == tuple(value.shape)
        assert symbol.dtype == keras.backend.standardize_dtype(value.dtype)
    values = keras.tree.flatten(keras.Model(symbols, made)(arrays))
    for value, other in zip(values, leaves, strict=True):
        np.testing.assert_allclose(
            to_numpy(value), to_numpy(other), rtol=1e-5, atol=1e-6
        )


def test_every_operation_on_tensors_is_tested():
    # What `symbolic` decorates registers itself.
    assert set(CALLS) == set(FUNCTIONS)
    sizes_and_states = {
        name
        for name in ops.__all__
        if name.endswith(("_state", "_state_spec", "_pattern"))
    }
    modules = {"feature_maps", "fourier", "random_features"}
    assert set(ops.__all__) - sizes_and_states - modules <= set(FUNCTIONS)


@pytest.mark.any_backend
def test_a_saved_model_has_its_operation(tmp_path):
    x = keras.Input((None, HEADS, DIM))
    model = keras.Model(x, ops.local_attention(x, x, x, window=3, causal=True))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    values = np.random.default_rng(0).normal(size=(2, 9, HEADS, DIM)).astype("float32")
    np.testing.assert_array_equal(to_numpy(loaded(values)), to_numpy(model(values)))


def test_an_unknown_operation_is_refused():
    config = {
        "module": "keras_efficient_attn.ops.common.symbolic",
        "class_name": "FunctionOperation",
        "config": {"function": "system"},
        "registered_name": "keras_efficient_attn>FunctionOperation",
    }
    with pytest.raises((TypeError, ValueError), match="function='system'"):
        keras.saving.deserialize_keras_object(config)
