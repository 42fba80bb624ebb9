"""On PyTorch, `torch.compile` compiles each operation without a graph break."""

import keras
import numpy as np
import pytest
from keras import ops as keras_ops

from keras_efficient_attn import ops

if keras.backend.backend() != "torch":
    pytest.skip("torch.compile is PyTorch's", allow_module_level=True)

import torch

BATCH, LENGTH, HEADS, DIM = 1, 10, 2, 4
# At least two blocks of everything.
CAUSAL = dict(causal=True)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


HEADS_SHAPE = (BATCH, LENGTH, HEADS, DIM)
QUERY, KEY, VALUE = (draw(*HEADS_SHAPE, seed=seed) for seed in range(3))
POSITIVE = np.exp(QUERY), np.exp(KEY), VALUE
CODES = torch.from_numpy(draw(HEADS, 4, DIM, seed=3))
SPANS = np.array([2.0, 5.0], "float32")
ROWS = torch.from_numpy(draw(5, DIM, seed=4))
BUCKETS = torch.randint(
    3, (BATCH, HEADS, 2, LENGTH), generator=torch.Generator().manual_seed(5)
)
LABELS = torch.tensor([[1, 0, 2]])


def attend_hashed(query, value):
    options = dict(num_buckets=3, chunk_size=2, aligned=True, **CAUSAL)
    return ops.lsh_attention(query, value, BUCKETS, **options)[0]


def cross_attend(hidden, kernel):
    return ops.chunked_cross_entropy(hidden, kernel, None, LABELS, chunk_size=2)


def compute(state):
    def step(n, state):
        return 2.0 * state, keras_ops.sigmoid(state[..., 0])

    running = keras_ops.ones((1, 3), "bool")
    return ops.adaptive_computation(step, state, running, 3)[0]


def map_features(x):
    features, log_scale = ops.feature_maps.positive_random_features(x, ROWS)
    return features * keras_ops.exp(log_scale)[..., None]


# Name: (operation of differentiable tensors, the tensors).
OPERATIONS = {
    "linear-causal": (
        lambda *x: ops.linear_attention(*x, **CAUSAL, chunk_size=2),
        POSITIVE,
    ),
    "linear-full": (lambda *x: ops.linear_attention(*x, chunk_size=2), POSITIVE),
    "local": (lambda *x: ops.local_attention(*x, window=3, **CAUSAL), None),
    "strided": (lambda *x: ops.sparse_attention(*x, stride=3, **CAUSAL), None),
    "vq": (
        lambda *x: ops.vq_attention(*x, CODES, window=3, block_length=2, **CAUSAL),
        None,
    ),
    "vq-order-2": (
        lambda *x: ops.vq_attention(*x, CODES, order=2, block_length=2, **CAUSAL),
        None,
    ),
    "adaptive-span": (
        lambda *x: ops.adaptive_span_attention(*x, window=6, **CAUSAL),
        (QUERY, KEY, VALUE, SPANS),
    ),
    "relative": (
        lambda *x: ops.relative_attention(*x, **CAUSAL),
        (QUERY, KEY, VALUE, draw(LENGTH, HEADS, DIM)),
    ),
    "fourier": (lambda *x: ops.fourier.fourier_attention(*x, 0.5, chunk_size=1), None),
    "lsh": (attend_hashed, (QUERY, VALUE)),
    "adaptive-computation": (compute, (draw(1, 3, DIM),)),
    "random-features": (map_features, (QUERY,)),
    "taylor-features": (lambda x: ops.feature_maps.taylor_features(x)[0], (QUERY,)),
    "cross-entropy": (cross_attend, (draw(1, 3, DIM), draw(DIM, 5))),
}


def differentiate(operation, arrays):
    """The output, and gradients of all arrays."""
    tensors = [torch.from_numpy(array).requires_grad_() for array in arrays]
    output = operation(*tensors)
    weight = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape)
    gradients = torch.autograd.grad((output * weight.cos()).sum(), tensors)
    return [tensor.detach().numpy() for tensor in (output, *gradients)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_program_and_its_results(name):
    operation, arrays = OPERATIONS[name]
    arrays = (QUERY, KEY, VALUE) if arrays is None else arrays
    torch.compiler.reset()
    program = torch.compile(operation, backend="aot_eager", fullgraph=True)
    pairs = zip(
        differentiate(program, arrays), differentiate(operation, arrays), strict=True
    )
    for received, expected in pairs:
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)
