"""Replacing attention in place, in models of all kinds."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn import LocalAttention
from keras_efficient_attn.models import convert_backbone, replace_attention
from tests.models.conversion import families
from tests.saving import saved_and_loaded

LAYER = keras.layers.MultiHeadAttention


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
        return x + self.named["last"](x, x, value_mask=None, use_causal_mask=True)

    def compute_output_shape(self, shape):
        return shape


class Hidden(keras.layers.Layer):
    """Holds its attention layer in an unsupported place."""

    def __init__(self):
        super().__init__()
        self.nested = [{"attention": keras.layers.MultiHeadAttention(2, 4)}]

    def build(self, shape):
        self.nested[0]["attention"].build(shape, shape)

    def call(self, x):
        return self.nested[0]["attention"](x, x)


class Holder(keras.layers.Layer):
    """A block around an attention layer that other blocks may share."""

    def __init__(self, attention, in_list):
        super().__init__()
        if in_list:
            self.attentions = [keras.layers.Identity(), attention]
        else:
            self.attention = attention

    @property
    def held(self):
        return getattr(self, "attention", None) or self.attentions[1]

    def build(self, shape):
        if not self.held.built:
            self.held.build(shape, shape)

    def call(self, x):
        return x + self.held(x, x)

    def compute_output_shape(self, shape):
        return shape


class Encoder(keras.Model):
    """A subclassed model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = LAYER(2, 4)

    def call(self, x):
        return x + self.attention(x, x)


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
    with pytest.warns(UserWarning, match="must be compiled again"):
        replaced = replace_attention(model, "local:window=8")
    assert len(replaced) == 4
    assert [id(v) for v in model.weights] == [id(v) for v in variables]
    found = families.efficient_layers(model)
    assert len(found) == 4 and all(isinstance(v, LocalAttention) for v in found)
    after = ops.convert_to_numpy(model([x, mask]))
    scale = np.max(abs(before))
    # Causal layers: what exists does not depend on the padding behind it.
    np.testing.assert_allclose(after[mask], before[mask], atol=1e-5 * scale)

    # Replace one again, with its own weights, which train with the others.
    with pytest.warns(UserWarning):
        replace_attention(model, "performer:feature_map=favor+,num_features=4", [3])
    assert len(model.weights) == len(variables) + 1
    with pytest.raises(ValueError, match="compile"):
        model.fit([x, mask], before, verbose=0)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit([x, mask], before, verbose=0)
    assert np.max(abs(ops.convert_to_numpy(model([x, mask])) - after)) > 1e-4


@pytest.mark.filterwarnings("ignore:.*compiled again")
def test_what_is_saved_loads_with_the_new_attention(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 8)).astype("float32")
    mask = np.array([[1, 1, 1, 0, 0], [1] * 5], "bool")
    model = make_model()
    # Two times, with weights of the layer's own that nobody can guess.
    replace_attention(model, "local:window=2")
    replace_attention(
        model, "vq:window=2,num_codes=3", [1, 3], calibrate=[([x, mask],)]
    )
    model.compile("sgd", "mse")
    expected = ops.convert_to_numpy(model([x, mask]))
    loaded = saved_and_loaded(model, tmp_path, {"Blocks": Blocks})
    names = [type(layer).__name__ for layer in families.efficient_layers(loaded)]
    assert names == ["LocalAttention", "VQAttention"] * 2
    after = ops.convert_to_numpy(loaded([x, mask]))
    np.testing.assert_allclose(after, expected, atol=1e-6 * np.max(abs(expected)))
    # It trains, and saves again.
    loaded.fit([x, mask], expected, verbose=0)
    expected = ops.convert_to_numpy(loaded([x, mask]))
    again = saved_and_loaded(loaded, tmp_path, {"Blocks": Blocks})
    after = ops.convert_to_numpy(again([x, mask]))
    np.testing.assert_allclose(after, expected, atol=1e-6 * np.max(abs(expected)))


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:.*compiled again")
def test_a_block_and_a_subclassed_model_load(tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    decoder = keras_hub.layers.TransformerDecoder(8, 2)
    decoder.build(x.shape)
    replace_attention(decoder, "local:window=2")
    inputs = keras.Input((5, 8))
    around = families.randomize(keras.Model(inputs, decoder(inputs)))

    encoder = Encoder()
    encoder(x)
    families.randomize(encoder)
    replace_attention(encoder, "local:window=2")
    for model in (around, encoder):
        expected = ops.convert_to_numpy(model(x))
        loaded = saved_and_loaded(model, tmp_path, {"Encoder": Encoder})
        assert [layer.window for layer in families.efficient_layers(loaded)] == [2]
        after = ops.convert_to_numpy(loaded(x))
        np.testing.assert_allclose(after, expected, atol=1e-6 * np.max(abs(expected)))
    hidden = keras.Sequential([keras.Input((None, 8)), Holder(LAYER(2, 4), False)])
    with pytest.warns(UserWarning, match="cannot be saved and loaded.*no `get_config`"):
        replace_attention(hidden, "local:window=2")


@pytest.mark.any_backend
def test_cross_attention_stays():
    short, long = keras.Input((5, 8)), keras.Input((9, 8))
    cross, own = (keras.layers.MultiHeadAttention(2, 4, name=n) for n in "ab")
    x = cross(short, value=long)
    model = keras.Model([short, long], own(x, x))
    with pytest.warns(UserWarning):
        (replaced,) = replace_attention(model, "local:window=8")
    assert "b" in replaced
    assert [type(layer) for layer in model.layers].count(type(cross)) == 1


@pytest.mark.any_backend
def test_refusals_leave_the_model_as_it_is():
    model = make_model()
    with pytest.raises(ValueError, match=r"from 0 to 3.*layers=\[4\]"):
        replace_attention(model, "local", [4])
    with pytest.raises(ValueError, match="cannot take the place"):
        replace_attention(model, "performer:window=-1")
    assert not families.efficient_layers(model)
    hidden = keras.Sequential([keras.Input((None, 8)), Hidden()])
    with pytest.raises(ValueError, match="must store its attention"):
        replace_attention(hidden, "local")
    assert not families.efficient_layers(hidden)
    for axes in (None, 2):
        inputs = keras.Input((3, 4, 8))
        attended = LAYER(2, 4, attention_axes=axes)(inputs, inputs)
        grid = keras.Model(inputs, attended)
        with pytest.raises(ValueError, match=r"one sequence.*\(None, 3, 4, 8\)"):
            replace_attention(grid, "local")
        assert not families.efficient_layers(grid)
    dense = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="no self-attention layer.*: none"):
        replace_attention(dense, "local")


def test_a_layer_that_two_hold_is_replaced_in_both():
    attention = keras.layers.MultiHeadAttention(2, 4)
    holders = [Holder(attention, False), Holder(attention, True)]
    model = families.randomize(keras.Sequential([keras.Input((None, 8)), *holders]))
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    before = ops.convert_to_numpy(model(x))
    number = len(model.weights)
    for options in ("window=8", "window=5"):
        with pytest.warns(UserWarning):
            assert len(replace_attention(model, f"local:{options}")) == 1
        (layer,) = families.efficient_layers(model)
        assert all(holder.held.attention is layer for holder in holders)
        assert len(model.weights) == number
        after = ops.convert_to_numpy(model(x))
        np.testing.assert_allclose(after, before, atol=1e-5 * np.max(abs(before)))


def test_a_mask_that_is_not_causal_is_refused():
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 8)).astype("float32")
    padding = np.array([[1, 1, 1, 0, 0], [1] * 5], "bool")
    calls = ({}, {"decoder_padding_mask": padding}, {"use_causal_mask": False})
    decoder = keras_hub.layers.TransformerDecoder(8, 2)
    decoder.build(x.shape)
    families.randomize(decoder)
    before = [ops.convert_to_numpy(decoder(x, **options)) for options in calls]
    with pytest.warns(UserWarning):
        replace_attention(decoder, "local:window=8")
    for options, expected in zip(calls, before, strict=True):
        output = ops.convert_to_numpy(decoder(x, **options))[padding]
        np.testing.assert_allclose(output, expected[padding], atol=1e-5)

    llama = families.make("llama", num_layers=1)
    block = convert_backbone(llama, "local:window=8").transformer_layers[0]
    wide = random.normal(size=(2, 5, 16)).astype("float32")
    block(wide, decoder_padding_mask=padding)
    # Even a causal mask: its content is not inspected.
    mask = ops.convert_to_tensor(np.tril(np.ones((2, 5, 5), "bool")))
    for layer, inputs in ((decoder, x), (block, wide)):
        with pytest.raises(ValueError, match=r"decoder_attention_mask.shape=\(2, 5, 5"):
            layer(inputs, decoder_attention_mask=mask)


class BandedDecoder(keras_hub.layers.TransformerDecoder):
    """A decoder that also hides far keys."""

    def _compute_self_attention_mask(self, *args, **kwargs):
        mask = super()._compute_self_attention_mask(*args, **kwargs)
        return ops.triu(mask, -1)


@pytest.mark.any_backend
def test_blocks_with_other_masks_are_refused():
    shape = (None, None, 8)
    banded = BandedDecoder(8, 2)
    banded.build(shape)
    sam = keras_hub.layers.SAM3TextEncoder(9, 8, 8, 1, 2, 8)
    sam.build((None, 5), (None, 5))
    for model in (banded, sam):
        with pytest.raises(ValueError, match="masks that differ between queries"):
            replace_attention(model, "local")
        assert not families.efficient_layers(model)
    decoder = keras_hub.layers.TransformerDecoder(8, 2)
    decoder.build(shape)
    holder = Holder(decoder._self_attention_layer, False)
    mixed = keras.Sequential([keras.Input((None, 8)), decoder, holder])
    with pytest.raises(ValueError, match="some are causal.*TransformerDecoder, Holder"):
        replace_attention(mixed, "local")
