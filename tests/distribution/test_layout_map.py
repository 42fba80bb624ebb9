"""The patterns of backbones' layout maps; needs no devices."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_efficient_attn import LinearAttention, PerformerAttention, RetentionAttention
from keras_efficient_attn.layers import attention_names, feature_maps
from keras_efficient_attn.models import (
    EfficientTransformerBackbone,
    convert_backbone,
)

pytestmark = pytest.mark.any_backend


def make_mesh(model=4, names=("batch", "model")):
    devices = [f"cpu:{i}" for i in range(2 * model)]
    return keras.distribution.DeviceMesh((2, model), names, devices)


def make_backbone(attention="linear", **options):
    return EfficientTransformerBackbone(64, 1, 4, 32, 128, attention, **options)


def check(backbone, layout_map, large):
    """Each weight has at most one layout, of its rank; large weights have one."""
    for weight in backbone.weights:
        # It raises for a path that matches two patterns.
        layout = layout_map[weight.path]
        if layout is None:
            assert np.prod(weight.shape) < large, weight.path
        else:
            assert len(layout.axes) == len(weight.shape), weight.path
            assert "model" in layout.axes, weight.path


@pytest.mark.parametrize("name", attention_names())
def test_every_large_weight_of_every_attention_is_split_once(name):
    options = {
        "vq": "vq:window=4,relative_positions=True",
        "linear": "linear:feature_map=hedgehog,use_gate=True",
        # Random numbers shared by heads are replicated.
        "performer": "performer:num_features=16",
    }
    backbone = make_backbone(options.get(name, name))
    layout_map = backbone.get_layout_map(make_mesh())
    check(backbone, layout_map, large=32 * 32)


def layers_with_features():
    """A layer for each feature map, with each set of weights that it can have."""
    made = [
        LinearAttention(4, 8, feature_map=name)
        for name in feature_maps.names()
        # It has no causal form, and the weights of the other random maps.
        if name not in ("projected", "favor++")
    ]
    made += [
        kind(4, 8, feature_map=feature_maps.get("projected", kind=weights))
        for kind in (LinearAttention, RetentionAttention)
        for weights in ("product", "hedgehog", "relu", "dpfp")
    ]
    made += [
        PerformerAttention(4, 8, feature_map=name, calibrated=True)
        for name in ("favor+", "hyperbolic", "taylor", "power")
    ]
    return made


@pytest.mark.parametrize(
    "layer", layers_with_features(), ids=lambda layer: str(layer.feature_map)
)
def test_weights_of_feature_maps_have_the_axes_of_their_layout(layer):
    backbone = make_backbone(layer)
    # Random numbers that heads share are replicated.
    check(backbone, backbone.get_layout_map(make_mesh()), large=256 * 8 + 1)


@pytest.mark.parametrize(
    "options",
    [
        dict(architecture="encoder_decoder", embedding="untied"),
        dict(feed_forward=dict(gated=True, chunk_size=8), residual="gated"),
        dict(feed_forward=dict(separable_convolution=True), convolution=4),
        dict(residual="reversible"),
        dict(recurrence=dict(num_recurrences=2, timestep_embedding="learned")),
    ],
    ids=["encoder_decoder", "gated", "convolutions", "reversible", "universal"],
)
def test_every_large_weight_of_every_kind_of_block_is_split_once(options):
    backbone = make_backbone(**options)
    check(backbone, backbone.get_layout_map(make_mesh()), large=32 * 32)


def test_heads_that_do_not_divide_are_whole_on_every_device():
    path = "decoder/block_0/attention/key/kernel"
    get = EfficientTransformerBackbone.get_layout_map
    whole = get(make_mesh(4), num_key_value_heads=2)
    assert whole[path].axes == ("batch", None, None)
    assert whole[path.replace("key", "query")].axes == ("batch", "model", None)
    split = get(make_mesh(2), num_key_value_heads=2)
    assert split[path].axes == ("batch", "model", None)


def test_a_converted_backbone_keeps_the_layout_map_of_its_kind():
    stock = keras_hub.models.LlamaBackbone(
        vocabulary_size=64,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=4,
        hidden_dim=32,
        intermediate_dim=128,
    )
    converted = convert_backbone(stock, "linear")
    layout_map = converted.get_layout_map(make_mesh())
    # KerasHub replicates the untied output embedding.
    reverse = {"token_embedding/reverse_embeddings"}
    matched = {w.path for w in converted.weights if layout_map[w.path] is not None}
    kernels = {w.path for w in converted.weights if np.prod(w.shape) >= 32 * 32}
    assert kernels - reverse <= matched


def test_a_mesh_without_the_axes_is_refused():
    get = EfficientTransformerBackbone.get_layout_map
    with pytest.raises(ValueError, match="`model_parallel_dim_name`.*'model'"):
        get(make_mesh(names=("batch", "heads")))
    with pytest.raises(ValueError, match="`data_parallel_dim_name`.*'data'"):
        get(make_mesh(), data_parallel_dim_name="data")
    with pytest.raises(TypeError, match="`device_mesh`"):
        get("tpu")
