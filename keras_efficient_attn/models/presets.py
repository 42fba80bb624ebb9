"""Preset configurations of the package, in addition to KerasHub's presets."""

import json
from pathlib import Path

from keras_hub.models import Backbone

FOLDER = Path(__file__).parent / "preset_files"


def preset_names():
    """The names of the configurations that ship with the package, as a tuple."""
    return tuple(sorted(folder.name for folder in FOLDER.iterdir()))


def preset_path(preset):
    """The folder of a shipped configuration; any other `preset` unchanged."""
    return str(FOLDER / preset if preset in preset_names() else preset)


class PresetMixin:
    """`from_preset` that knows the shipped configurations.

    Put it before KerasHub's classes in the list of base classes.
    """

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """A model from a preset.

        Args:
            preset: One of `preset_names()`, with `load_weights=False`; a folder that
                `save_to_preset` wrote; or another preset that KerasHub loads.
            load_weights: Whether to load weights, or leave them random. Shipped
                configurations have none. Defaults to `True`.
            **kwargs: Arguments of the backbone or the task that replace those of
                the preset, such as `dtype` or `positions`.

        Raises:
            ValueError: If the preset does not exist, or has no weights to load.
        """
        if preset in preset_names() and load_weights:
            raise ValueError(
                f"{preset!r} is a configuration without weights: pass "
                f"`load_weights=False`. Received: load_weights={load_weights!r}"
            )
        path = preset_path(preset)
        if issubclass(cls, Backbone) and "dtype" not in kwargs:
            kwargs |= _quantized_dtype(path)
        return super().from_preset(path, load_weights=load_weights, **kwargs)


def _quantized_dtype(path):
    """`{"dtype": policies}` of a quantised backbone in a local folder, else `{}`.

    KerasHub drops a backbone's dtype and applies the default policy, but the weights of
    a quantised backbone need its own policy.
    """
    file = Path(path, "config.json")
    if not file.exists():
        return {}
    dtype = json.loads(file.read_text())["config"].get("dtype")
    if isinstance(dtype, dict) and dtype["class_name"] == "DTypePolicyMap":
        return {"dtype": dtype}
    return {}
