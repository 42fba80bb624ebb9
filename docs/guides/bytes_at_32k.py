"""
Title: Train on rows of 32,768 bytes
Description: A language model trained on rows of 32,768 bytes, on one machine.
"""

"""
## Introduction

Bytes need no tokenizer, and neither do the bases of DNA, but their sequences are long. A
file of 32,768 bytes has a billion pairs of positions. The gated delta rule does not form
them: its time and memory grow linearly with the length.

This guide trains on rows of 32,768 bytes of the standard library's source. For DNA,
`EfficientByteTokenizer` reads the letters A, C, G, T and N as they are.

## Setup
"""

import sysconfig
import time
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np

from keras_efficient_attn import models

keras.utils.set_random_seed(0)

LENGTH = 32768
STEPS = 60
VALIDATION_ROWS = 8
TIMED_LENGTHS = [4096, 32768]

"""
## Prepare the data

All files are joined to one text, and its last rows are held out.
"""

paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
paths = [path for path in paths if "site-packages" not in path.parts]
text = np.frombuffer(b"".join(path.read_bytes() for path in paths), "uint8")
held_out = text[-VALIDATION_ROWS * (LENGTH + 1) :].reshape(VALIDATION_ROWS, -1)
training = text[: -held_out.size]


def draw_batches(seed=0):
    random = np.random.default_rng(seed)
    while True:
        start = random.integers(len(training) - LENGTH)
        yield inputs_and_targets(training[None, start : start + LENGTH + 1])


def inputs_and_targets(rows):
    rows = rows.astype("int32")
    tokens = rows[:, :-1]
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, rows[:, 1:]


"""
## Build the model

`gated-delta` is the default of decoders. With `residual="reversible"`, the backward pass
recomputes the attention and the feed-forward network of each block: only the activations of
one block at a time are in memory.
"""


def build_model(attention="gated-delta"):
    backbone = models.EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=2,
        hidden_dim=64,
        intermediate_dim=256,
        attention=attention,
        residual="reversible",
    )
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, STEPS, warmup_target=4e-3, warmup_steps=max(1, STEPS // 20)
    )
    model = models.EfficientCausalLM(backbone)
    model.compile(
        keras.optimizers.AdamW(schedule, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    return model


model = build_model()

"""
## Time a step

A step has one row. The first step is excluded, because it compiles.
"""


def seconds_per_step(length):
    timed = build_model()
    inputs, targets = inputs_and_targets(training[None, : length + 1])
    times = []
    for _ in range(3):
        start = time.perf_counter()
        timed.train_on_batch(inputs, targets)
        times.append(time.perf_counter() - start)
    return min(times[1:])


for length in TIMED_LENGTHS:
    print(f"{length:6} bytes: {seconds_per_step(length):.2f} s per step")

"""
## Train it
"""

model.fit(draw_batches(), steps_per_epoch=max(1, STEPS // 4), epochs=4, verbose=2)

"""
## Test it

The test prints bits per byte of the held-out rows, by the position in the row. A model that
uses distant context has fewer bits at later positions. Sixty steps are too few for that:
here, the differences come from the text.
"""

inputs, targets = inputs_and_targets(held_out)
logits = model.predict(inputs, batch_size=1, verbose=0)
nats = keras.ops.convert_to_numpy(
    keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
)
bits = nats.mean(axis=0) / np.log(2)
edges = [LENGTH // 2**i for i in range(7, -1, -1)]
parts = list(zip([0, *edges[:-1]], edges))
means = [bits[start:end].mean() for start, end in parts]
for (start, end), mean in zip(parts, means):
    print(f"bytes {start:6} to {end:6}: {mean:.2f} bits per byte")
print(f"all: {bits.mean():.2f} bits per byte")

plt.figure(figsize=(6, 4))
plt.plot([f"{end:,}" for _, end in parts], means, "o-")
plt.xlabel("up to this byte of the row")
plt.ylabel("bits per byte")
plt.savefig("bytes_at_32k.png", dpi=100, bbox_inches="tight")

"""
![Bits per byte by the position in the row](bytes_at_32k.png)

## Conclusion

A training step takes a row of 32,768 positions whole. For larger vocabularies,
`ChunkedVocabularyLoss` avoids the logits of the whole row. On several devices,
`SequenceParallel` splits a row ([More than one device](../distribution.md)).
"""
