"""Creating layers from names such as `performer:feature_map=elu`."""

import keras
import pytest

from keras_efficient_attn import PerformerAttention, SoftmaxAttention
from keras_efficient_attn.layers import attention_names, get_attention

pytestmark = pytest.mark.any_backend


def test_options_become_constructor_arguments():
    layer = get_attention(
        "performer:feature_map=favor+,num_features=24,window=8,use_bias=False",
        num_heads=2,
        key_dim=4,
        use_bias=True,
    )
    assert isinstance(layer, PerformerAttention)
    config = layer.get_config()
    assert config["feature_map"] == "favor+"
    assert (config["num_features"], config["window"]) == (24, 8)
    assert config["use_bias"] is False


def test_values_may_hold_commas():
    layer = get_attention(
        "softmax:output_shape=(3,),dropout=0.5", num_heads=1, key_dim=2
    )
    assert type(layer) is SoftmaxAttention
    assert layer.get_config()["output_shape"] == (3,)
    assert layer.get_config()["dropout"] == 0.5


@pytest.mark.parametrize("name", attention_names())
def test_every_name_makes_a_layer(name):
    layer = get_attention(name, num_heads=2, key_dim=4)
    assert isinstance(layer, keras.layers.MultiHeadAttention)


@pytest.mark.parametrize(
    ("identifier", "error", "message"),
    [
        ("nothing", ValueError, "nothing"),
        ("performer:no_such=1", ValueError, "no_such"),
        ("performer:feature_map=nothing", ValueError, "nothing"),
        (3, TypeError, "3"),
    ],
)
def test_errors_name_what_was_received(identifier, error, message):
    with pytest.raises(error, match=message):
        get_attention(identifier, num_heads=2, key_dim=4)
