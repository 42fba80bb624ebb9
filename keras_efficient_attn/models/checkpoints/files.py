"""The files of a checkpoint: its configuration and its tensors, in one file or more."""

import json
from pathlib import Path

from keras_efficient_attn.models.keras_hub_internals import preset_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def import_safetensors():
    """The package `safetensors`, imported when it is first used.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Checkpoints of transformers need the package safetensors: pip install "
            "safetensors"
        ) from error
    return safetensors


def read_config(preset):
    """The configuration of a checkpoint of transformers, or `None` for other presets.

    Args:
        preset: A folder, or a handle that KerasHub downloads, such as `"hf://…"`.
    """
    try:
        path = preset_file(preset, CONFIG)
    except (FileNotFoundError, ValueError):
        # KerasHub says what is wrong with it.
        return None
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    return config if "model_type" in config else None


class TensorFiles:
    """The tensors of a checkpoint, read one by one.

    Args:
        preset: A folder or a handle.

    Raises:
        ValueError: If it has no file of weights.
    """

    def __init__(self, preset):
        self._files = {}
        for path in self._paths(preset):
            file = import_safetensors().safe_open(path, framework="np")
            self._files |= dict.fromkeys(file.keys(), file)

    def _paths(self, preset):
        try:
            index = json.loads(Path(preset_file(preset, INDEX)).read_text())
            names = sorted(set(index["weight_map"].values()))
        except FileNotFoundError:
            names = [WEIGHTS]
        try:
            return [preset_file(preset, name) for name in names]
        except FileNotFoundError as error:
            raise ValueError(
                f"The checkpoint must have {WEIGHTS}, or {INDEX} and its files: "
                f"convert others with transformers' `save_pretrained`. {error}"
            ) from error

    @property
    def names(self):
        """The names of all tensors, a set."""
        return set(self._files)

    def shape(self, name):
        """The shape of a tensor, which is not read for it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name):
        """A tensor, a NumPy array."""
        return self._files[name].get_tensor(name)


def write_checkpoint(folder, config, tensors, max_shard_size):
    """Writes a configuration and tensors, one file after the other.

    Args:
        folder: A path; made if it does not exist.
        config: Dict for `config.json`.
        tensors: Iterable of names and arrays.
        max_shard_size: Bytes of tensors in one file, which has at least one tensor.
    """
    save_file = import_safetensors().numpy.save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    for old in [folder / INDEX, *folder.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    shard, size, total, shards = {}, 0, 0, []

    def write():
        path = folder / f"part-{len(shards)}"
        save_file(shard, path, metadata={"format": "pt"})
        shards.append((path, list(shard)))

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_size:
            write()
            shard, size = {}, 0
        shard[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    if len(shards) == 1:
        shards[0][0].rename(folder / WEIGHTS)
        return
    weight_map = {}
    for number, (path, names) in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
