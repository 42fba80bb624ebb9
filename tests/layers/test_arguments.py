"""Arguments of layers, which their configurations repeat."""

import keras
import pytest

from keras_efficient_attn.layers.arguments import KeepsArguments


class Scaled(KeepsArguments, keras.layers.Layer):
    def __init__(self, scale=1.0, unit=None, **kwargs):
        super().__init__(**kwargs)
        self.keep(locals(), omit=("unit",))


class Shifted(Scaled):
    def __init__(self, *args, shift=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.keep(locals())


@pytest.mark.any_backend
def test_the_configuration_has_the_current_values_of_all_classes():
    layer = Shifted(3.0, shift=2.0, name="shifted")
    layer.scale = 4.0
    config = layer.get_config()
    assert {**config, "scale": 4.0, "shift": 2.0} == config
    assert not {"self", "args", "kwargs", "__class__"} & set(config)
    restored = Shifted.from_config(config)
    assert (restored.scale, restored.shift) == (4.0, 2.0)


@pytest.mark.any_backend
def test_an_omitted_argument_is_neither_an_attribute_nor_kept():
    layer = Scaled(unit="m")
    assert not hasattr(layer, "unit") and layer.kept_arguments() == {"scale": 1.0}
