"""From a checkpoint to a backbone, and back."""

import copy

from keras_efficient_attn.layers.keras_internals import deferred_variables
from keras_efficient_attn.models.checkpoints import linear
from keras_efficient_attn.models.checkpoints.files import (
    TensorFiles,
    write_checkpoint,
)
from keras_efficient_attn.models.checkpoints.olmo_hybrid import OlmoHybrid
from keras_efficient_attn.models.checkpoints.reformer import Reformer
from keras_efficient_attn.models.checkpoints.weights import load_weights

FAMILIES = {
    **linear.FAMILIES,
    "olmo_hybrid": OlmoHybrid(),
    "reformer": Reformer(),
}
# Arguments of a backbone that do not change the architecture.
OVERRIDES = ("dtype", "dropout", "takes_documents", "name", "trainable")


def family_of(config):
    """The family of a configuration's `model_type`.

    Raises:
        ValueError: If there is none.
    """
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        raise ValueError(
            f"`model_type` of config.json must be one of {', '.join(sorted(FAMILIES))};"
            " load other types with KerasHub. Received: model_type="
            f"{model_type!r}"
        )
    return FAMILIES[model_type]


def read_backbone(cls, preset, config, weights=True, **overrides):
    """A backbone from a checkpoint.

    Args:
        cls: The class of the backbone.
        preset: A folder or a handle.
        config: Dict, its `config.json`.
        weights: Whether to load weights. Defaults to `True`.
        **overrides: Arguments of the backbone, of `OVERRIDES`.

    Raises:
        ValueError: For an argument that would change the architecture; for an option of
            the configuration that is not supported, before a weight is read; for
            tensors that do not fit.
    """
    for name, value in overrides.items():
        if name not in OVERRIDES:
            raise ValueError(
                f"`{name}` is set by the checkpoint's config.json: leave it out; "
                f"{', '.join(OVERRIDES)} may be given. Received: {name}={value!r}"
            )
    family = family_of(config)
    arguments = family.arguments(config)
    # No memory for initial values that tensors replace.
    with deferred_variables():
        backbone = cls(
            **arguments, **overrides, transformers_config=copy.deepcopy(config)
        )
        if weights:
            found = family.backbone_weights(backbone, config)
            files = family.files(TensorFiles(preset), found)
            load_weights(found, files, family.ignored(config))
    return backbone


def export_backbone(backbone, folder, max_shard_size):
    """Writes a backbone that `read_backbone` made, as it has been trained since.

    Args:
        backbone: The backbone.
        folder: A path.
        max_shard_size: Bytes of tensors in one file.

    Raises:
        ValueError: If the backbone has another origin, or is quantised.
    """
    config = backbone.transformers_config
    if config is None:
        raise ValueError(
            "Only a backbone that `from_preset` made from a config.json of "
            "transformers, with weights or with load_weights=False, can be written in "
            "that format. Received: a backbone with transformers_config=None"
        )
    for layer in backbone._flatten_layers():
        if getattr(layer, "quantization_mode", None) is not None:
            raise ValueError(
                "A quantised model cannot be written in this format: export it before "
                f"`quantize`. Received: {layer.path} in {layer.quantization_mode}"
            )
    weights = family_of(config).backbone_weights(backbone, config)
    tensors = ((weight.names[0], weight.read()) for weight in weights)
    write_checkpoint(folder, config, tensors, max_shard_size)
