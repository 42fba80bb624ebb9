"""Arguments that a call or a constructor would otherwise misread in silence."""

import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.layers import get_attention
from tests.autodiff import compile_step, to_numpy
from tests.contract.cases import LENGTH, inputs

MASK = np.arange(LENGTH) < np.array([[LENGTH], [21]])
ADDED = np.where(MASK, 0.0, -1e9).astype("float32")


@pytest.mark.once_a_layer
def test_masks_of_zeros_and_ones_may_be_floats(case):
    layer, x = case.built(), inputs()
    options = dict(use_causal_mask=case.usual)
    expected = to_numpy(layer(x, x, key_mask=MASK, **options))
    received = layer(x, x, key_mask=MASK.astype("float32"), **options)
    np.testing.assert_array_equal(to_numpy(received), expected)


@pytest.mark.once_a_layer
def test_a_mask_to_add_to_the_logits_is_refused(case):
    layer, x = case.built(), inputs()
    for name, mask in (
        ("query_mask", ADDED),
        ("value_mask", ADDED),
        ("key_mask", ADDED),
        ("attention_mask", ADDED[:, None]),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be boolean.*Received"):
            layer(x, x, use_causal_mask=case.usual, **{name: mask})


@pytest.mark.parametrize("name", ["linear", "local", "delta", "softmax"])
def test_masks_may_be_lists(name):
    layer, x = get_attention(name, num_heads=2, key_dim=4), inputs()
    for options in ({"key_mask": MASK}, {"query_mask": MASK.astype("int32")}):
        ((mask_name, mask),) = options.items()
        expected = layer(x, x, use_causal_mask=True, **options)
        received = layer(x, x, use_causal_mask=True, **{mask_name: mask.tolist()})
        np.testing.assert_array_equal(to_numpy(received), to_numpy(expected))
    for mask in ("all", [[True], [True, False]], [["yes"] * LENGTH] * 2):
        with pytest.raises(TypeError, match="`key_mask` must be .*Received: key_mask="):
            layer(x, x, use_causal_mask=True, key_mask=mask)


@pytest.mark.parametrize("name", ["linear", "delta", "retention", "softmax"])
def test_ragged_tensors_are_refused(name, backend):
    if backend != "tensorflow":
        pytest.skip("only TensorFlow has them")
    import tensorflow as tf

    ragged = tf.RaggedTensor.from_row_lengths(inputs()[0, :5], [3, 2])
    layer, x = get_attention(name, num_heads=2, key_dim=4), ragged.to_tensor()
    for argument, arguments in (("query", (ragged, x)), ("value", (x, ragged))):
        with pytest.raises(TypeError, match=f"`{argument}` must be a dense tensor"):
            layer(*arguments, use_causal_mask=True)
    with pytest.raises(TypeError, match="`key` must be a dense tensor"):
        layer(x, x, key=ragged, use_causal_mask=True)


@pytest.mark.parametrize("name", ["linear", "local:window=4"])
def test_a_compiled_program_gives_nan_for_such_a_mask(name, backend):
    if backend == "torch":
        pytest.skip("the layers' calls are eager")
    layer, x = get_attention(name, num_heads=2, key_dim=4), inputs()
    layer.build(x.shape, x.shape)
    call = compile_step(lambda x, mask: layer(x, x, key_mask=mask))
    x = ops.convert_to_tensor(x)
    good = to_numpy(call(x, ops.cast(MASK, "float32")))
    expected = to_numpy(layer(x, x, key_mask=MASK))
    np.testing.assert_allclose(good, expected, rtol=1e-4, atol=1e-5)
    bad = to_numpy(call(x, ops.convert_to_tensor(ADDED)))
    assert np.isnan(bad[1, 21:]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_has_no_other_keys(causal):
    layer, x = get_attention("reformer", num_heads=2, key_dim=4), inputs()
    other, options = inputs(seed=5), dict(use_causal_mask=causal)
    for arguments in ((x, other), (x, x, other)):
        with pytest.raises(ValueError, match="pass `query` as `key`.*Received"):
            layer(*arguments, **options)
    # Values may differ.
    assert tuple(layer(x, other, key=x, **options).shape) == x.shape


@pytest.mark.any_backend
def test_integers_of_numpy_are_those_of_python():
    for name, options in (
        ("sparse", dict(pattern="fixed", stride=32)),
        ("reformer", dict(num_buckets=4, bucket_size=4)),
        ("vq", dict(num_codes=8, window=4)),
    ):
        sizes = dict(num_heads=2, key_dim=4, seed=1)
        layer = get_attention(name, **sizes, **options)
        options = {n: np.int16(x) if n != "pattern" else x for n, x in options.items()}
        other, x = get_attention(name, **sizes, **options), inputs()
        for each in (layer, other):
            each.build(x.shape, x.shape)
        other.set_weights(layer.get_weights())
        expected, found = (each(x, x, use_causal_mask=True) for each in (layer, other))
        np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


@pytest.mark.parametrize(
    ("identifier", "message"),
    [
        ("linear:use_gate=false", "`use_gate` must be a boolean.*use_gate='false'"),
        ("linear:use_bias=off", "`use_bias` must be a boolean.*use_bias='off'"),
        ("linear:use_bias", "must have the form `name=value`.*'use_bias'"),
        ("linear:use_bias=", "must have the form `name=value`.*'use_bias='"),
        ("softmax:flash_attention=yes", "`flash_attention` must be a boolean"),
        (
            "vq:window=3,window=4",
            "give the option .window. once.*window=3 and window=4",
        ),
    ],
)
@pytest.mark.any_backend
def test_options_are_read_strictly(identifier, message):
    with pytest.raises(ValueError, match=message):
        get_attention(identifier, num_heads=2, key_dim=4)


@pytest.mark.any_backend
def test_axes_are_no_booleans():
    with pytest.raises(ValueError, match="`attention_axes` must be integers"):
        get_attention("linear", num_heads=2, key_dim=4, attention_axes=True)
