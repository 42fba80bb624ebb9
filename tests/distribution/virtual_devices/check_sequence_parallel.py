"""Sequences split over devices, against one device."""

import re

import jax
import keras
import numpy as np
import pytest

from keras_efficient_attn import ops
from keras_efficient_attn.distribution import SequenceParallel
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.models import EfficientTransformerBackbone
from tests.distribution.sequence_cases import CASES, WRONG_WEIGHTS, make_inputs
from tests.distribution.virtual_devices.programs import (
    collectives,
    count,
    sent_bytes,
    sent_sizes,
)

DIFFERENTIATED = "query", "key", "value", "log_decay", "beta"


def make_mesh(shape=(2, 4)):
    devices = [f"cpu:{i}" for i in range(np.prod(shape))]
    return keras.distribution.DeviceMesh(shape, ("batch", "sequence"), devices)


def compile_case(name, target, inputs):
    """The program for an output and the gradients of a scalar function of it."""
    varied = {key: inputs[key] for key in DIFFERENTIATED}

    def loss(varied, inputs):
        output = CASES[name](target, {**inputs, **varied}, target is ops)
        return jax.numpy.sum(jax.numpy.sin(output)), output

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return step.lower(varied, inputs).compile(), (varied, inputs)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name):
    results = []
    for target in (ops, SequenceParallel(make_mesh())):
        compiled, arguments = compile_case(name, target, make_inputs(48))
        (_, output), gradients = compiled(*arguments)
        results.append((output, gradients))
    (expected, expected_gradients), (output, gradients) = results
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    for key, gradient in expected_gradients.items():
        atol = 1e-5 * max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(gradients[key], gradient, rtol=1e-4, atol=atol)


def test_codes_of_half_precision_are_those_of_one_device():
    random = np.random.default_rng(0)
    x = jax.numpy.asarray(random.normal(size=(2, 48, 2, 4)), "bfloat16")
    # Their numbers are more than bfloat16 can tell apart.
    codes = jax.numpy.asarray(random.normal(size=(2, 600, 4)), "bfloat16")
    expected = ops.vq_attention(x, x, x, codes, causal=True)
    received = SequenceParallel(make_mesh()).vq_attention(x, x, x, codes)
    assert received.dtype == expected.dtype
    received, expected = (np.asarray(t, "float32") for t in (received, expected))
    np.testing.assert_allclose(received, expected, rtol=0.01, atol=0.01)
    with pytest.raises(ValueError, match="`codebook` must have the shape"):
        SequenceParallel(make_mesh()).vq_attention(x, x, x, codes[:1])


@pytest.mark.parametrize("name", ["causal", "gated delta", "window", "expanded codes"])
def test_bytes_that_travel_do_not_depend_on_the_length(name):
    split = SequenceParallel(make_mesh((1, 4)))
    short, long = (
        compile_case(name, split, make_inputs(length))[0] for length in (64, 256)
    )
    assert sent_bytes(short) > 0
    # The sum of the outputs, a scalar, is also transferred.
    assert sent_bytes(long) == sent_bytes(short)


def test_linear_attention_gathers_its_state_once():
    split = SequenceParallel(make_mesh((1, 4)))
    inputs = make_inputs(64)

    def forward(inputs):
        return CASES["decay"](split, inputs, False)

    compiled = jax.jit(forward).lower(inputs).compile()
    sent = collectives(compiled)
    assert [name for name, _ in sent] == ["all-gather"]


def test_later_positions_do_not_change_earlier_outputs():
    split, inputs = SequenceParallel(make_mesh()), make_inputs(48)
    inputs["key_mask"][:] = True
    changed = {**inputs, "key": inputs["key"].copy(), "value": inputs["value"].copy()}
    changed["key"][:, 30:] += 1.0
    changed["value"][:, 30:] = 7.0
    for name in ("causal", "gated delta", "window", "codes and window"):
        before, after = (CASES[name](split, x, False) for x in (inputs, changed))
        np.testing.assert_array_equal(after[:, :30], before[:, :30])
        assert np.abs(after[:, 30:] - before[:, 30:]).max() > 1e-3


# Gathers of a forward pass, and tensors that go to a neighbour in it and come back in
# the backward pass: `None` where the compiler adds its own, for short convolutions.
STATE, WINDOW, CODES = 1, 5, 2


@pytest.mark.parametrize(
    "name, causal, gathers, shifts",
    [
        ("performer:window=5", True, STATE, WINDOW),
        ("linear:rotary_wavelength=100,num_key_value_heads=2", True, STATE, 0),
        ("performer:feature_map=favor++", False, STATE, 0),
        ("local:window=6", True, 0, WINDOW),
        ("gated-delta", True, STATE, None),
        ("vq:window=6,num_codes=8,relative_positions=True", True, CODES, WINDOW + 1),
    ],
)
def test_layers_split_their_sequences_within_a_scope(name, causal, gathers, shifts):
    layer = get_attention(name, num_heads=4, key_dim=4)
    x = np.random.default_rng(0).normal(size=(2, 48, 16)).astype("float32")
    mask = np.arange(48) < [[48], [31]]
    layer.build(x.shape, x.shape)
    weights = [v.value for v in layer.trainable_variables]
    frozen = [v.value for v in layer.non_trainable_variables]

    def loss(weights, x):
        options = dict(key_mask=mask, use_causal_mask=causal)
        output, _ = layer.stateless_call(weights, frozen, x, x, **options)
        return jax.numpy.sum(jax.numpy.sin(output)), output

    step = jax.value_and_grad(loss, has_aux=True)
    (_, expected), expected_gradients = jax.jit(step)(weights, x)
    with SequenceParallel(make_mesh()).scope():
        compiled = jax.jit(lambda weights, x: step(weights, x)).lower(weights, x)
        compiled = compiled.compile()
    (_, output), gradients = compiled(weights, x)
    sent = count(compiled)
    assert sent.get("all-gather", 0) == gathers
    assert "all-to-all" not in sent
    if shifts is not None:
        assert sent.get("collective-permute", 0) == shifts
    # Nothing with the positions of all devices, or all positions of one.
    assert not sent_sizes(compiled) & {48, 12, 24, 36}
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        atol = 1e-4 * np.abs(b).max() + 1e-5
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=atol)


def train():
    """Losses and weights of a small model after `fit`."""
    keras.utils.set_random_seed(0)
    backbone = EfficientTransformerBackbone(
        16, 2, 4, 16, 32, attention=["linear", "vq:window=6,num_codes=8"]
    )
    model = keras.Model(backbone.input, keras.layers.Dense(4)(backbone.output))
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    inputs = {
        "token_ids": rng.integers(0, 16, (8, 48)),
        "padding_mask": np.ones((8, 48), "int32"),
    }
    targets = rng.normal(size=(8, 48, 4))
    history = model.fit(inputs, targets, batch_size=4, epochs=2, verbose=0)
    return history.history["loss"], [np.asarray(w) for w in model.get_weights()]


def test_fit_with_batches_and_sequences_split_is_that_of_one_device():
    expected, expected_weights = train()
    mesh = make_mesh()
    distribution = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"
    )
    with distribution.scope(), SequenceParallel().scope():
        losses, weights = train()
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    # Adam divides by gradients that may be rounding errors; codes and counts are sums.
    for a, b in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("shape", WRONG_WEIGHTS, ids=str)
def test_log_weights_of_another_shape_are_refused(shape):
    x = {**make_inputs(8), "key_log_weight": np.zeros(shape, "float32")}
    with pytest.raises(ValueError, match=f"`key_log_weight`.*{re.escape(str(shape))}"):
        CASES["weighted"](SequenceParallel(make_mesh()), x, False)


def test_what_cannot_be_split_is_refused():
    split, inputs = SequenceParallel(make_mesh()), make_inputs(48)
    odd = make_inputs(46)
    with pytest.raises(ValueError, match="number of devices.*46, 4 devices"):
        CASES["causal"](split, odd, False)
    with pytest.raises(ValueError, match="`window`.*a reach of 13.*12 positions"):
        split.local_attention(
            *(inputs[name] for name in ("query", "key", "value")), window=14
        )
    with pytest.raises(ValueError, match="`axis_name`.*'time'"):
        SequenceParallel(make_mesh(), axis_name="time")
    with pytest.raises(TypeError, match="`device_mesh`.*None"):
        SequenceParallel()
    with pytest.raises(ValueError, match="`group`"):
        SequenceParallel(make_mesh(), group="all")
    layer = get_attention("vq:window=6", num_heads=2, key_dim=4)
    x = np.zeros((1, 48, 8), "float32")
    with split.scope(), pytest.raises(ValueError, match="use_causal_mask=False"):
        layer(x, x)
