"""Files that models are made from: shipped configurations, LoRA, and pickled ones."""

import json
import os
from pathlib import Path

# Keras also needs it.
import h5py
import keras
from keras_hub.models import Backbone

from keras_efficient_attn.layers.keras_internals import require
from keras_efficient_attn.models.checkpoints.files import read_config

FOLDER = Path(__file__).parent / "preset_files"


# Checkpoints of the same architecture at the same or another size.
HANDLES = {
    "delta_net_340m": ("hf://fla-hub/delta_net-1.3B-100B",),
    "gla_340m": (
        "hf://fla-hub/gla-340M-15B",
        "hf://fla-hub/gla-1.3B-100B",
        "hf://fla-hub/gla-2.7B-100B",
    ),
    "reformer_enwik8_12l": ("hf://google/reformer-enwik8",),
    "retnet_1.3b": ("hf://fla-hub/retnet-1.3B-100B",),
}


def preset_names():
    """The configurations that ship with the package, and checkpoints like them.

    Returns:
        Dict of names, and of tuples of `"hf://…"` handles that `from_preset` reads:
        trained models of the same architecture, whose sizes and details are their own.
        Most configurations have none.
    """
    names = sorted(folder.name for folder in FOLDER.iterdir())
    return {name: HANDLES.get(name, ()) for name in names}


def preset_path(preset):
    """The folder of a shipped configuration; any other `preset` unchanged."""
    return str(FOLDER / preset if preset in preset_names() else preset)


class OptionalDocuments:
    """A Functional model whose inputs may leave out `document_ids`.

    Keras wants all names, with `None` for an optional input without a value.
    """

    def _with_all_names(self, inputs):
        if "document_ids" in self.input and "document_ids" not in inputs:
            return {**inputs, "document_ids": None}
        return inputs

    def __call__(self, inputs, *args, **kwargs):
        return super().__call__(self._with_all_names(inputs), *args, **kwargs)

    def call(self, inputs, training=None, mask=None, **kwargs):
        # A trainer on JAX calls this directly. Trainers look for `training` in the
        # signature, and otherwise train as if they did not.
        inputs = self._with_all_names(inputs)
        return super().call(inputs, training=training, mask=mask, **kwargs)


class PresetMixin:
    """`from_preset` that knows the shipped configurations.

    Put it before KerasHub's classes in the list of base classes.
    """

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """A model from a preset.

        Args:
            preset: One of `preset_names()`, with `load_weights=False`; a folder that
                `save_to_preset` wrote; a folder or an `"hf://…"` handle in the format
                of transformers, with a `model_type` that the page on configurations
                lists; or another preset that KerasHub loads.
            load_weights: Whether to load weights, or leave them random. Shipped
                configurations have none. Defaults to `True`.
            **kwargs: Arguments of the backbone or the task that replace those of
                the preset, such as `dtype` or `positions`; of a checkpoint in the
                format of transformers, only those that leave the architecture as it is:
                `dtype`, `dropout`, `takes_documents`, `name`, `trainable`.

        Raises:
            ValueError: If the preset does not exist, has no weights to load, or is a
                model that the package does not have.
        """
        if preset in preset_names() and load_weights:
            handles = " or ".join(map(repr, preset_names()[preset]))
            others = f", or load {handles}" if handles else ""
            raise ValueError(
                f"{preset!r} is a configuration without weights: pass "
                f"`load_weights=False`{others}. Received: load_weights={load_weights!r}"
            )
        path = preset_path(preset)
        config = None if preset in preset_names() else read_config(path)
        if config is not None:
            return cls.from_checkpoint(path, config, load_weights, **kwargs)
        if issubclass(cls, Backbone) and "dtype" not in kwargs:
            kwargs |= _quantized_dtype(path)
        return super().from_preset(path, load_weights=load_weights, **kwargs)


class PicklesAsFile:
    """Mixin of models whose classes are made when they are first needed.

    Keras pickles a model as the contents of its file and a method of its class, which
    another process has not made. Put it before the model's class among the bases.
    """

    def __reduce__(self):
        _, arguments = super().__reduce__()
        return load_pickled, arguments


def load_pickled(file):
    """The model in the contents of a file, a `BytesIO`."""
    return require(keras.Model, "_unpickle_model")(file)


def _quantized_dtype(path):
    """`{"dtype": policies}` of a quantised backbone in a local folder, else `{}`.

    KerasHub drops a backbone's dtype and applies the default policy, but the weights of
    a quantised backbone need its own policy.
    """
    file = Path(path, "config.json")
    if not file.exists():
        return {}
    # Files of other libraries have no "config": KerasHub says what is wrong.
    dtype = json.loads(file.read_text()).get("config", {}).get("dtype")
    if isinstance(dtype, dict) and dtype["class_name"] == "DTypePolicyMap":
        return {"dtype": dtype}
    return {}


def check_lora_file(filepath):
    """Raises `ValueError` for a file that `save_lora_weights` has not written.

    KerasHub allocates factors of the rank in the file before it reads them. An
    untrusted file could contain any rank, or refer to arrays elsewhere.

    Args:
        filepath: Path of the file.
    """
    try:
        with h5py.File(filepath) as file:
            size = _check_factors(file)
        stored = os.path.getsize(filepath)
        # Genuine factors are not compressed.
        if size > stored:
            raise ValueError(
                f"its arrays have {size:,} bytes, more than the {stored:,} of the file"
            )
    except FileNotFoundError:
        raise
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"`filepath` is not a LoRA file: {error}. Received: filepath={filepath}"
        ) from error


def _check_factors(file):
    """Bytes of the factors; raises if a factor does not have the file's rank."""
    rank = _array(file, "lora/vars/rank")[()]
    size = 0
    for layer in file["lora"]:
        if layer == "vars":
            continue
        a, b = (_array(file, f"lora/{layer}/vars/lora_kernel_{name}") for name in "ab")
        if (a.shape[-1:], b.shape[:1]) != ((rank,), (rank,)):
            raise ValueError(f"factors {a.shape} and {b.shape} are not of rank {rank}")
        size += a.nbytes + b.nbytes
    return size


def _array(file, path):
    """An array stored in this file itself."""
    parent = file
    for name in path.split("/"):
        if not isinstance(parent.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{path} is a link, and not stored in the file")
        parent = parent[name]
    if not isinstance(parent, h5py.Dataset) or parent.external or parent.is_virtual:
        raise ValueError(f"{path} is not one of its arrays")
    return parent
