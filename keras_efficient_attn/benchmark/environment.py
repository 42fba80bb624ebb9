"""Versions and device, recorded with the results."""

import importlib.metadata
import os
import platform
from pathlib import Path

import keras
import numpy as np

from keras_efficient_attn import __version__
from keras_efficient_attn.benchmark.execution import backend_module
from keras_efficient_attn.ops.common.backend import BACKEND


def describe_environment():
    """Versions and device of this process, as a dict of strings and numbers."""
    backend = BACKEND
    return {
        "backend": backend,
        "backend_version": importlib.metadata.version(backend),
        "device": backend_module().device(),
        "cpu": _cpu(),
        "cpu_count": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "keras": keras.__version__,
        "numpy": np.__version__,
        "keras_efficient_attn": __version__,
    }


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.processor()
