"""Quantised layers in saved files."""

import json

import keras
import numpy as np

from keras_efficient_attn.layers.keras_internals import (
    flat_layers,
    set_dtype_policy,
    track_parameters,
)

# Key of the description that `save_own_variables` stores; variables have numbers.
ENTRY = "quantization"
# Attributes of policies that are arguments of the configurations.
SIZES = ("block_size", "weight_bits", "group_size")


class KeepsQuantization:
    """Mixin of a Keras layer or model: files say how the layers below are quantised.

    Keras says it in configurations, by the paths of layers. So a layer that its parent
    makes, or that has another path in the file, would be made unquantised, and could
    not load its weights. Place it before the class of Keras among the bases.
    """

    def save_own_variables(self, store):
        super().save_own_variables(store)
        modes = {}
        for index, layer in enumerate(flat_layers(self)):
            if layer.quantization_mode is not None:
                # Keras cannot save quantised layers that hold the whole policy map.
                set_dtype_policy(layer, policy_of(layer))
                modes[index] = _describe(layer)
        if modes:
            store[ENTRY] = np.frombuffer(json.dumps(modes).encode(), "uint8")

    def load_own_variables(self, store):
        arrays = {name: store[name] for name in store.keys()}
        modes = arrays.pop(ENTRY, None)
        super().load_own_variables(arrays)
        if modes is None:
            return
        layers = flat_layers(self)
        for index, description in json.loads(np.asarray(modes).tobytes()).items():
            layer = layers[int(index)]
            weights_only = description.pop("weights_only", False)
            if layer.quantization_mode is None:
                # The policy of a map: `quantize` derives the next from its name.
                set_dtype_policy(layer, policy_of(layer))
                layer.quantize(config=_config(**description))
            if weights_only:
                # Made from a policy alone, layers quantise what they read as well.
                layer.inputs_quantizer = None
        track_parameters(self)


def policy_of(layer):
    """The policy of a layer, also where it has those of others as well."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path]
    return policy


def _describe(layer):
    policy = layer.dtype_policy
    sizes = {name: getattr(policy, name) for name in SIZES if hasattr(policy, name)}
    if getattr(layer, "inputs_quantizer", layer) is None:
        sizes["weights_only"] = True
    return {"mode": policy.quantization_mode, **sizes}


def _config(mode, **sizes):
    """The argument of `quantize`, for weights that are then read from a file."""
    if mode in ("gptq", "awq"):
        sizes |= dict(dataset=None, tokenizer=None)
    return {
        "int8": keras.quantizers.Int8QuantizationConfig,
        "int4": keras.quantizers.Int4QuantizationConfig,
        "float8": keras.quantizers.Float8QuantizationConfig,
        "gptq": keras.quantizers.GPTQConfig,
        "awq": keras.quantizers.AWQConfig,
    }[mode](**sizes)
