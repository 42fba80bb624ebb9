"""Causal models of bytes, tested beyond the length of their training."""

import math

import keras
import numpy as np

from byte_lm.data import batches, load_splits, model_inputs
from keras_efficient_attn.models import EfficientCausalLM
from verdict.models import backbone, fit, trained

SIZES = {
    "layers": 2,
    "heads": 4,
    "dim": 128,
    "steps": 1000,
    "batch": 2,
    "learning_rate": 2e-3,
    "length": 1024,
    # Of training, and of the windows of test text. The same bytes count at all lengths:
    # the last of each window.
    "lengths": [1024, 4096, 16384],
    "scored": 512,
    "windows": 16,
    # The standard library's source by default; the windows are spread evenly.
    "text": None,
}


def options(candidate, convolution):
    """Options of the backbone; `None` for candidates that do not take part."""
    return candidate.options(convolution)


def measure(options, seed, sizes):
    """Bits per byte by the length of the windows, and the parameters."""
    splits = load_splits(sizes["text"])
    model = EfficientCausalLM(backbone(options, sizes, 256, "decoder", seed))
    text = splits["train"]
    fit(model, batches(text, sizes["length"], sizes["batch"], seed), sizes)
    bits = {
        str(length): bits_per_byte(model, splits["test"], length, sizes)
        for length in sizes["lengths"]
    }
    return {"bits_per_byte": bits, "parameters": trained(model)}


def bits_per_byte(model, text, length, sizes):
    """Mean bits of the last `scored` bytes of windows that end in the same places."""
    scored, longest = sizes["scored"], max(sizes["lengths"])
    ends = np.linspace(longest + 1, len(text), sizes["windows"]).astype(int)
    rows = text[ends[:, None] + np.arange(-length - 1, 0)].astype("int32")
    size = max(1, sizes["batch"] * sizes["length"] // length)
    nats = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        logits = model.predict_on_batch(model_inputs(part[:, :-1]))[:, -scored:]
        nats.append(
            keras.ops.convert_to_numpy(
                keras.losses.sparse_categorical_crossentropy(
                    part[:, -scored:], logits, from_logits=True
                )
            )
        )
    return float(np.concatenate(nats).mean()) / math.log(2)
