"""Names of the layers that the package registers, without those of tests."""

from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.layers.attention.registry import attention_class


def own_attention_names():
    return [
        name
        for name in attention_names()
        if attention_class(name).__module__.startswith("keras_efficient_attn.")
    ]
