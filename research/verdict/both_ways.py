"""Masked models of bytes: layers that are not causal only."""

import itertools
import math

import keras
import numpy as np

from byte_lm.data import load_splits
from byte_lm.model import trained_parameters
from command_line import UsageError
from keras_efficient_attn.models import EfficientMaskedLM
from verdict.models import backbone, fit

SIZES = {
    "layers": 2,
    "heads": 4,
    "dim": 128,
    "steps": 500,
    "batch": 8,
    "learning_rate": 2e-3,
    "length": 256,
    "lengths": [256, 1024],
    "windows": 32,
    # One byte in `every` is hidden, as whole runs of `run` bytes.
    "every": 6,
    "run": 2,
    "text": None,
}
# The byte that stands for a hidden one; no text in UTF-8 has it.
HIDDEN = 255


def options(candidate, convolution):
    """Options of the backbone; `None` for layers that are causal only."""
    if candidate.causal_only:
        return None
    return candidate.options(convolution, both_ways=True)


def measure(options, seed, sizes):
    """Bits per hidden byte by the length of the windows, and the parameters."""
    splits = load_splits(sizes["text"])
    model = EfficientMaskedLM(backbone(options, sizes, 256, "encoder", seed))
    text = splits["train"]
    if HIDDEN in text:
        raise UsageError(
            f"--sizes text: the text must not contain the byte {HIDDEN}, which stands "
            "for hidden bytes"
        )
    fit(model, training_batches(text, sizes, seed), sizes)
    bits = {
        str(length): bits_per_byte(model, splits["test"], length, sizes)
        for length in sizes["lengths"]
    }
    return {"bits_per_byte": bits, "parameters": trained_parameters(model)}


def hide(rows, random, sizes):
    """Inputs with runs of hidden bytes, and the bytes that were there."""
    count, length = rows.shape
    run, period = sizes["run"], sizes["every"] * sizes["run"]
    # One run in each stretch of `period` bytes, anywhere in it.
    starts = np.arange(0, length - period + 1, period)
    starts = starts + random.integers(0, period - run + 1, (count, len(starts)))
    places = (starts[:, :, None] + np.arange(run)).reshape(count, -1)
    hidden = np.take_along_axis(rows, places, axis=1)
    tokens = rows.copy()
    np.put_along_axis(tokens, places, HIDDEN, axis=1)
    inputs = {
        "token_ids": tokens,
        "padding_mask": np.ones_like(tokens),
        "mask_positions": places.astype("int32"),
    }
    return inputs, hidden


def training_batches(text, sizes, seed):
    """Endless `(inputs, hidden bytes)`; batch `k` depends on `seed` and `k` only."""
    length = sizes["length"]
    for step in itertools.count():
        random = np.random.default_rng([seed, step])
        starts = random.integers(0, len(text) - length, sizes["batch"])
        rows = text[starts[:, None] + np.arange(length)].astype("int32")
        yield hide(rows, random, sizes)


def bits_per_byte(model, text, length, sizes):
    """Mean bits of the hidden bytes of the windows' middles.

    Windows of all lengths have the same middle, as long as a row of training, and the
    same bytes are hidden in it; around it, others.
    """
    longest, middle = max(sizes["lengths"]), sizes["length"]
    starts = np.linspace(0, len(text) - longest, sizes["windows"]).astype(int)
    starts = starts + (longest - middle) // 2
    side = (length - middle) // 2
    rows = text[starts[:, None] + np.arange(-side, middle + side)].astype("int32")
    inputs, hidden = hide(
        rows[:, side : side + middle], np.random.default_rng(0), sizes
    )
    around, _ = hide(rows, np.random.default_rng(1), sizes)
    tokens = around["token_ids"]
    tokens[:, side : side + middle] = inputs["token_ids"]
    inputs = {
        "token_ids": tokens,
        "padding_mask": np.ones_like(tokens),
        "mask_positions": inputs["mask_positions"] + side,
    }
    logits = model.predict(
        inputs, batch_size=max(1, sizes["batch"] * middle // length), verbose=0
    )
    nats = keras.losses.sparse_categorical_crossentropy(
        hidden, logits, from_logits=True
    )
    return float(keras.ops.convert_to_numpy(nats).mean()) / math.log(2)
