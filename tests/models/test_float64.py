"""Models in float64 compute nothing in float32: their programs on JAX are searched."""

import keras
import numpy as np
import pytest

from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.models import EfficientTransformerBackbone

if keras.backend.backend() != "jax":
    pytest.skip("JAX shows its programs", allow_module_level=True)

import jax

NARROW = "float32", "bfloat16", "float16"


def narrow_tensors(jaxpr):
    """The operations of a program in fewer bits, a list of `(operation, type)`."""
    found = []
    for equation in jaxpr.eqns:
        found += [
            (equation.primitive.name, str(variable.aval))
            for variable in equation.outvars
            if str(variable.aval.dtype) in NARROW
        ]
        for inner in jax.core.jaxprs_in_params(equation.params):
            found += narrow_tensors(inner)
    return found


def check(**options):
    data = {
        "token_ids": np.zeros((2, 12), "int32"),
        "padding_mask": np.ones((2, 12), "int32"),
    }
    with jax.enable_x64(True):
        backbone = EfficientTransformerBackbone(
            16, 1, 2, 8, 16, dtype="float64", **options
        )
        weights = [v.value for v in backbone.trainable_variables]
        others = [v.value for v in backbone.non_trainable_variables]
        program = jax.make_jaxpr(backbone.stateless_call)(weights, others, data)
    assert not narrow_tensors(program.jaxpr)


@pytest.mark.parametrize("name", attention_names())
def test_attention(name):
    check(attention=name)


@pytest.mark.parametrize(
    "options",
    [
        dict(positions="sinusoidal"),
        dict(positions="rotary"),
        dict(convolution=4),
        dict(residual="gated"),
        dict(residual=dict(kind="reordered", norm="rms_norm")),
        dict(residual="reversible"),
        dict(feed_forward=dict(gated=True, chunk_size=4)),
        dict(feed_forward=dict(separable_convolution=True)),
        dict(
            recurrence=dict(
                num_recurrences=2,
                timestep_embedding="sinusoidal",
                adaptive_computation={},
            )
        ),
    ],
    ids=str,
)
def test_parts(options):
    check(attention="softmax", **options)


def test_what_is_narrow_is_found():
    def narrow(x):
        return jax.lax.map(lambda x: jax.numpy.sin(x.astype("float32")), x)

    with jax.enable_x64(True):
        program = jax.make_jaxpr(narrow)(np.ones(3))
    assert ("sin", "float32[]") in narrow_tensors(program.jaxpr)
