"""Efficient attention layers for Keras 3."""

import importlib

from keras_efficient_attn import distribution as distribution
from keras_efficient_attn import layers as layers
from keras_efficient_attn import ops as ops
from keras_efficient_attn.layers import *  # noqa: F403

__version__ = "0.1.0"

# The classes of layers; their functions stay in `layers`.
__all__ = [name for name in layers.__all__ if isinstance(getattr(layers, name), type)]


def __getattr__(name):
    # Loaded on first use: the models import KerasHub.
    if name in ("benchmark", "models"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
