"""The folders of `tests/data/checkpoints`, and their models."""

from pathlib import Path

import numpy as np

from keras_efficient_attn.models import EfficientCausalLM

ROOT = Path(__file__).parents[2] / "data" / "checkpoints"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def golden(name):
    """`(ids, logits)` of the published code."""
    arrays = np.load(ROOT / name / "golden.npz")
    return arrays["ids"].astype("int32"), arrays["logits"]


def load(name, **options):
    return EfficientCausalLM.from_preset(str(ROOT / name), **options)


def inputs(ids):
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}
