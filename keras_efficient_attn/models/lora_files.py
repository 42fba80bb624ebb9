"""What a LoRA file is checked for before a model is changed by it."""

import os

# Keras needs it, too.
import h5py


def check_lora_file(filepath):
    """Raises `ValueError` for a file that `save_lora_weights` has not written.

    KerasHub makes factors of the rank that a file names, and then reads the file: a
    foreign one could name any rank, or arrays elsewhere.

    Args:
        filepath: Path of the file.
    """
    try:
        with h5py.File(filepath) as file:
            size = _check_factors(file)
        stored = os.path.getsize(filepath)
        # Factors are not compressed.
        if size > stored:
            raise ValueError(f"{size:,} bytes of arrays in {stored:,} of the file")
    except FileNotFoundError:
        raise
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"`filepath` is no LoRA file: {error}. Received: filepath={filepath}"
        ) from error


def _check_factors(file):
    """Bytes of the factors; raises for factors that are not of the file's rank."""
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
    """An array of this file, and of no other."""
    parent = file
    for name in path.split("/"):
        if not isinstance(parent.get(name, getlink=True), h5py.HardLink):
            raise ValueError(f"{path} is not in it, but linked")
        parent = parent[name]
    if not isinstance(parent, h5py.Dataset) or parent.external or parent.is_virtual:
        raise ValueError(f"{path} is no array of it")
    return parent
