"""Checks a LoRA file before it changes a model."""

import os

# Keras also needs it.
import h5py


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
            raise ValueError(f"{size:,} bytes of arrays in {stored:,} of the file")
    except FileNotFoundError:
        raise
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"`filepath` is no LoRA file: {error}. Received: filepath={filepath}"
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
            raise ValueError(f"{path} is not in it, but linked")
        parent = parent[name]
    if not isinstance(parent, h5py.Dataset) or parent.external or parent.is_virtual:
        raise ValueError(f"{path} is no array of it")
    return parent
