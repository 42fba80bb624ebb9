"""Point 10: every layer is exported for accelerators, with gradients."""

import pytest
from keras import ops

from keras_efficient_attn.ops.common.plan import plan_for
from tests.contract.cases import DIM

PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}


@pytest.mark.once_a_layer
@pytest.mark.parametrize("kind", PLATFORMS)
def test_jax_exports_the_layer(case, kind, backend):
    if backend != "jax":
        pytest.skip("the export is JAX's")
    import jax

    layer = case.make(dtype="mixed_bfloat16", **case.long)
    shape = (1, case.long_length, DIM)
    layer.build(shape, shape)
    variables = layer.trainable_variables, layer.non_trainable_variables
    weights = [[variable.value for variable in group] for group in variables]

    def loss(trainable, fixed, x):
        output, _ = layer.stateless_call(
            trainable, fixed, x, x, use_causal_mask=case.usual, training=True
        )
        return ops.sum(ops.cast(output, "float32"))

    function = jax.jit(jax.value_and_grad(loss))
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    platforms = (PLATFORMS[kind],)
    with plan_for(kind):
        exported = jax.export.export(function, platforms=platforms)(*weights, x)
    assert exported.platforms == platforms
    value, *gradients = exported.out_avals
    assert value.shape == ()
    assert [g.shape for g in gradients] == [w.shape for w in weights[0]]
