"""One token of a layer costs one pass over its state, counted in JAX equations."""

import keras
import pytest
from keras import ops

from keras_efficient_attn.layers import get_attention

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Counts the equations of JAX."
)
HEADS, HEAD_DIM = 4, 32
WIDTH = HEADS * HEAD_DIM
# Maximum number of equations for one token, with the four projections.
MOST = {
    "linear": 80,
    "performer:feature_map=elu": 80,
    "performer": 100,
    "performer:window=32,num_features=64": 180,
    "retention": 120,
    "gated-linear": 100,
    "delta": 170,
    "gated-delta": 210,
    "kimi-delta": 210,
    "vq:num_codes=64,window=32": 180,
    "vq:num_codes=64,window=None": 180,
    "local:window=32": 60,
    "local:query_block=16": 80,
    "sparse:stride=16": 140,
    "sparse:stride=16,pattern=fixed": 140,
    "adaptive-span:max_span=32": 90,
    "xl:memory_length=32": 95,
    "softmax": 100,
}


def count(jaxpr):
    """Number of equations, including those inside calls."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [
            value.jaxpr if hasattr(value, "jaxpr") else value
            for value in equation.params.values()
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ]
        total += 1 + sum(map(count, inner))
    return total


@pytest.mark.parametrize("name", MOST)
def test_a_token_takes_few_equations(name):
    import jax

    layer = get_attention(name, num_heads=HEADS, key_dim=HEAD_DIM)
    layer.build((1, 8, WIDTH), (1, 8, WIDTH))
    state = layer.get_initial_state(1, 64 if layer.state_grows else None)
    token = ops.zeros((1, 1, WIDTH))

    def step(token, state):
        return layer(token, token, use_causal_mask=True, state=state)

    equations = count(jax.make_jaxpr(step)(token, state).jaxpr)
    print(f"{name}: {equations} equations per token")
    assert equations <= MOST[name]
