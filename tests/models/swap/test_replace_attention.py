"""Replacing attention in place, in models of all kinds."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LocalAttention
from keras_efficient_attn.models import replace_attention
from tests.models.swap import families


class Blocks(keras.layers.Layer):
    """Holds its attention layers in a list, a tuple and a dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.listed = [keras.layers.MultiHeadAttention(2, 4)]
        self.paired = keras.layers.MultiHeadAttention(2, 4), keras.layers.Identity()
        self.named = {"last": keras.layers.MultiHeadAttention(2, 4, use_gate=True)}

    def build(self, shape):
        for layer in (*self.listed, self.paired[0], self.named["last"]):
            layer.build(shape, shape)

    def call(self, x):
        for layer in (*self.listed, self.paired[0]):
            x = x + layer(x, x, use_causal_mask=True)
        return x + self.named["last"](x, x, value_mask=None)

    def compute_output_shape(self, shape):
        return shape


class Hidden(keras.layers.Layer):
    """Holds its attention layer where nobody looks for it."""

    def __init__(self):
        super().__init__()
        self.nested = [{"attention": keras.layers.MultiHeadAttention(2, 4)}]

    def build(self, shape):
        self.nested[0]["attention"].build(shape, shape)

    def call(self, x):
        return self.nested[0]["attention"](x, x)


def make_model():
    inputs = keras.Input((None, 8))
    mask = keras.Input((None,), dtype="bool")
    layer = keras.layers.MultiHeadAttention(2, 4, dropout=0.0)
    x = layer(inputs, inputs, attention_mask=ops.expand_dims(mask, 1))
    x = layer(x, inputs, inputs, attention_mask=ops.expand_dims(mask, 1))
    return families.randomize(keras.Model([inputs, mask], Blocks()(x)))


def test_attributes_lists_dicts_and_graphs():
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 8)).astype("float32")
    mask = np.array([[1, 1, 1, 0, 0], [1] * 5], "bool")
    model = make_model()
    before = ops.convert_to_numpy(model([x, mask]))
    variables = model.weights
    with pytest.warns(UserWarning, match="compiled again, and does not survive saving"):
        replaced = replace_attention(model, "local:window=8")
    assert len(replaced) == 4
    assert [id(v) for v in model.weights] == [id(v) for v in variables]
    found = families.stand_ins(model)
    assert len(found) == 4 and all(isinstance(v, LocalAttention) for v in found)
    after = ops.convert_to_numpy(model([x, mask]))
    np.testing.assert_allclose(after, before, atol=1e-5 * np.max(abs(before)))

    # Again, one of them, with weights of its own, which train with the others.
    with pytest.warns(UserWarning):
        replace_attention(model, "performer:feature_map=favor+,num_features=4", [3])
    assert len(model.weights) == len(variables) + 1
    with pytest.raises(ValueError, match="compile"):
        model.fit([x, mask], before, verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit([x, mask], before, verbose=0)
    assert np.max(abs(ops.convert_to_numpy(model([x, mask])) - after)) > 1e-4


def test_refusals_leave_the_model_as_it_is():
    model = make_model()
    with pytest.raises(ValueError, match=r"from 0 to 3.*layers=\[4\]"):
        replace_attention(model, "local", [4])
    with pytest.raises(ValueError, match="cannot take the place"):
        replace_attention(model, "performer:window=-1")
    assert not families.stand_ins(model)
    hidden = keras.Sequential([keras.Input((None, 8)), Hidden()])
    with pytest.raises(ValueError, match="does not hold its attention"):
        replace_attention(hidden, "local")
    assert not families.stand_ins(hidden)
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="no self-attention layer.*: none"):
        replace_attention(dense, "local")
