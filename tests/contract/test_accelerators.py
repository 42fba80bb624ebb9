"""Point 10: every layer is exported for accelerators, forward and with gradients."""

import pytest
from keras import ops

from keras_efficient_attn.ops.common.plan import planned_for
from tests.contract.cases import DIM

PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}


@pytest.mark.once_a_layer
@pytest.mark.parametrize("platform", PLATFORMS)
def test_jax_exports_the_layer(case, platform, backend):
    if backend != "jax":
        pytest.skip("the export is JAX's")
    import jax

    layer = case.make(dtype="mixed_bfloat16", **case.long)
    length = case.long_length
    layer.build((1, length, DIM), (1, length, DIM))
    weights = [
        [v.value for v in w]
        for w in (layer.trainable_variables, layer.non_trainable_variables)
    ]

    def loss(trainable, fixed, x):
        output, _ = layer.stateless_call(
            trainable, fixed, x, x, use_causal_mask=case.usual, training=True
        )
        return ops.sum(ops.cast(output, "float32"))

    x = jax.ShapeDtypeStruct((1, length, DIM), "bfloat16")
    function = jax.jit(jax.value_and_grad(loss))
    with planned_for(PLATFORMS[platform]):
        exported = jax.export.export(function, platforms=[platform])(*weights, x)
    assert exported.platforms == (platform,)
    value, *gradients = exported.out_avals
    assert value.shape == ()
    assert [g.shape for g in gradients] == [w.shape for w in weights[0]]
