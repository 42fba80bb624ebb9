"""Fitting to data, and choosing layers by their errors on data."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_efficient_attn.models import convert_backbone, replace_attention
from keras_efficient_attn.models.conversion.sites import find_sites
from tests.models.conversion import families
from tests.saving import saved_and_loaded

# As many codes as there are keys in the data: every key is its own code.
EXACT_ON_ITS_DATA = "vq:window=1,num_codes=16"


@pytest.mark.parametrize(
    "name, options", [("bert", ""), ("llama", ""), ("llama", ",order=2,rank=2")]
)
def test_with_a_code_for_each_key_the_data_are_exact(name, options):
    attention = EXACT_ON_ITS_DATA + options
    backbone = families.make(name)
    data = families.inputs(backbone)
    first = {key: value[:1] for key, value in data.items()}
    second = {key: value[1:] for key, value in data.items()}
    targets = np.zeros((1, 1))
    efficient = convert_backbone(
        backbone, attention, calibrate=[first, (second, targets)]
    )
    families.assert_same_outputs(backbone, efficient, data)
    # Random codes are not exact: the fit makes them so.
    plain = convert_backbone(backbone, attention)
    with pytest.raises(AssertionError):
        families.assert_same_outputs(backbone, plain, data, 1e-2)


def test_queries_and_keys_are_fitted_as_the_model_rotates_them():
    backbone = families.make("llama")
    efficient = convert_backbone(backbone, families.LOCAL)
    old = find_sites(backbone)[0].layer
    new = families.efficient_layers(efficient)[0]
    x = np.random.default_rng(0).normal(size=(2, 6, 16)).astype("float32")
    for project, dense in (
        (new._query_dense, old._query_dense),
        (new._key_dense, old._key_dense),
    ):
        expected = ops.convert_to_numpy(old.rotary_embedding_layer(dense(x)))
        assert np.max(abs(expected - ops.convert_to_numpy(dense(x)))) > 0.1
        np.testing.assert_allclose(
            ops.convert_to_numpy(project(x)), expected, atol=1e-6
        )


def test_calibrated_features_are_fitted_where_the_model_is_causal():
    # Expanded about the means, weights are closer than about zero.
    backbone = families.make("gpt2", num_layers=1)
    data = families.inputs(backbone, padded=False)
    errors = []
    for calibrate in (None, data):
        efficient = convert_backbone(
            backbone,
            "performer:feature_map=power,rank=4,window=2,calibrated=True",
            calibrate=calibrate,
        )
        errors.append(families.output_error(efficient, backbone, data))
    assert errors[1] < 0.7 * errors[0]


def test_in_place():
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    inputs = keras.Input((None, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)
    attended = layer(inputs, inputs, use_causal_mask=True)
    model = families.randomize(keras.Model(inputs, attended))
    before = ops.convert_to_numpy(model(x))
    with pytest.warns(UserWarning):
        replace_attention(model, EXACT_ON_ITS_DATA, calibrate=x)
    np.testing.assert_allclose(ops.convert_to_numpy(model(x)), before, atol=1e-5)


@pytest.mark.any_backend
def test_as_many_layers_as_the_budget_allows():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    attention = "local:window=2"

    def error(layers):
        efficient = convert_backbone(backbone, attention, layers)
        return families.output_error(efficient, backbone, data)

    alone = error([0]), error([1])
    least = int(np.argmin(alone))

    def chosen(budget):
        return convert_backbone(
            backbone, attention, "auto", calibrate=data, budget=budget
        )

    both = error(None)
    assert chosen(1.001 * both).attention_layers is None
    efficient = chosen((alone[least] + both) / 2)
    assert efficient.attention_layers == [least]
    families.assert_same_outputs(
        convert_backbone(backbone, attention, [least]), efficient, data
    )
    with pytest.raises(ValueError, match=f"No layer .* of layer {least}"):
        chosen(0.999 * alone[least])


@pytest.mark.any_backend
def test_layers_are_chosen_where_the_model_has_a_cache():
    # KerasHub's attention with a cache has other call arguments than Keras'.
    backbone = families.make("gpt2")
    data = families.inputs(backbone, padded=False)
    efficient = convert_backbone(
        backbone, families.PERFORMER, "auto", calibrate=data, budget=1e-3
    )
    assert efficient.attention_layers is None
    with pytest.raises(ValueError, match="No layer"):
        convert_backbone(
            backbone, "local:window=1", "auto", calibrate=data, budget=1e-3
        )


@pytest.mark.any_backend
def test_errors_that_are_no_number_are_too_large():
    backbone = families.make("gpt2", num_layers=1)
    data = families.inputs(backbone, padded=False)
    for weight in backbone.weights:
        if weight.path.endswith("position_embedding/embeddings"):
            weight.assign(np.full(weight.shape, np.nan))
    with pytest.raises(ValueError, match="smallest error, inf"):
        convert_backbone(backbone, families.LOCAL, "auto", calibrate=data, budget=1.0)


@pytest.mark.any_backend
def test_an_encoder_counts_as_its_decoder_does():
    backbone = families.make("bart", num_layers=1)
    data = families.inputs(backbone)
    # The window holds both tokens: the decoder's error comes from its inputs only.
    data |= {name: x[:, :2] for name, x in data.items() if "decoder" in name}
    data["decoder_padding_mask"][:] = 1
    attention = "local:window=2"
    first = convert_backbone(backbone, attention, [0])
    of_encoder, of_decoder = (
        _relative_error(first, backbone, data, name) for name in ("encoder", "decoder")
    )
    assert of_decoder < 0.9 * of_encoder
    for budget, layers in ((0.99 * of_encoder, [1]), (1.01 * of_encoder, None)):
        efficient = convert_backbone(
            backbone, attention, "auto", calibrate=data, budget=budget
        )
        assert efficient.attention_layers == layers


def _relative_error(new, old, data, name):
    kept = data[f"{name}_padding_mask"] > 0
    new, old = (
        ops.convert_to_numpy(m(data)[f"{name}_sequence_output"])[kept]
        for m in (new, old)
    )
    return families.relative_error(new, old)


@pytest.mark.any_backend
def test_both_towers_count():
    sizes = dict(hidden_dim=16, num_layers=1, num_heads=2, intermediate_dim=24)
    vision = keras_hub.models.CLIPVisionEncoder(
        patch_size=2, image_shape=(4, 4, 3), name="vision", **sizes
    )
    text = keras_hub.models.CLIPTextEncoder(
        50, 16, max_sequence_length=8, name="text", **sizes
    )
    backbone = keras_hub.models.CLIPBackbone(vision, text, projection_dim=8)
    families.randomize(backbone)
    random = np.random.default_rng(0)
    images = random.normal(size=(2, 4, 4, 3)).astype("float32")
    tokens = random.integers(1, 50, (2, 7)).astype("int32")
    # The encoders read five patches, and seven tokens or three.
    for attention, length, tower in (
        ("local:window=5", 7, vision),
        ("local:window=4", 3, text),
    ):
        data = {"images": images, "token_ids": tokens[:, :length]}
        efficient = convert_backbone(
            backbone, attention, "auto", calibrate=data, budget=1e-4
        )
        sites = enumerate(find_sites(backbone))
        exact = [i for i, site in sites if site.block in tower.encoder_layers]
        assert efficient.attention_layers == exact
        families.assert_same_outputs(backbone, efficient, data)


@pytest.mark.parametrize(
    "name, attention",
    [
        ("bert", "vq:window=1,num_codes=4"),
        ("llama", "vq:window=1,num_codes=4,order=2,rank=2"),
    ],
)
def test_what_was_fitted_is_saved(name, attention, tmp_path):
    backbone = families.make(name, num_layers=1)
    data = families.inputs(backbone)
    efficient = convert_backbone(backbone, attention, calibrate=data)
    with pytest.raises(AssertionError):
        plain = convert_backbone(backbone, attention)
        families.assert_same_outputs(plain, efficient, data, 1e-3)
    efficient.save_to_preset(str(tmp_path / "preset"))
    for loaded in (
        saved_and_loaded(efficient, tmp_path),
        keras_hub.models.Backbone.from_preset(str(tmp_path / "preset")),
    ):
        families.assert_same_outputs(efficient, loaded, data)


@pytest.mark.any_backend
def test_chosen_layers_keep_what_was_fitted():
    backbone = families.make("distil_bert")
    data = families.inputs(backbone)
    attention = "vq:window=1,num_codes=4"
    whole = convert_backbone(backbone, attention, calibrate=data)
    first = convert_backbone(backbone, attention, [0], calibrate=data)
    second = convert_backbone(backbone, attention, [1], calibrate=data)
    errors = [
        families.output_error(model, backbone, data) for model in (first, second, whole)
    ]
    budget = (min(errors[:2]) + max(errors)) / 2
    efficient = convert_backbone(
        backbone, attention, "auto", calibrate=data, budget=budget
    )
    (layer,) = efficient.attention_layers
    families.assert_same_outputs((first, second)[layer], efficient, data)


@pytest.mark.any_backend
def test_refusals():
    backbone = families.make("distil_bert", num_layers=1)
    data = families.inputs(backbone)
    vq, local = "vq", families.LOCAL
    for attention, options, message in (
        (
            local,
            dict(calibrate=data),
            "None of the layers can be calibrated.*LocalAttention",
        ),
        (vq, dict(calibrate=[]), "at least one batch"),
        (vq, dict(budget=0.1), "layers=None, budget=0.1"),
        (vq, dict(layers="auto", calibrate=data), "budget=None"),
        (vq, dict(layers="auto", calibrate=data, budget=0), "budget=0"),
        (vq, dict(layers="auto", budget=0.1), "calibrate=None"),
        (vq, dict(layers="all"), "layers='all'"),
        (local, dict(layers="auto", calibrate=[], budget=0.1), "at least one batch"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_backbone(backbone, attention, **options)
    with pytest.warns(UserWarning, match="can be fitted to data"):
        convert_backbone(backbone, vq)
    with pytest.raises(TypeError, match="calibrate=3"):
        convert_backbone(backbone, vq, calibrate=3)
