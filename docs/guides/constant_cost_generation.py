"""
Title: Generate text at constant cost
Description: A causal language model whose next token costs the same after any context.
"""

"""
## Introduction

A Transformer with softmax attention keeps the keys and values of everything that it has
read, and reads all of them again for each new token. The gated delta rule, like all linear
attention, sums them into a state of constant size. The 10,000th token then costs as much as
the 10th.

This guide trains a small byte-level language model on the source of the Python standard
library, generates text, and measures generation with both kinds of attention.

## Setup
"""

import sysconfig
import time
from pathlib import Path

import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np

from keras_efficient_attn import models

keras.utils.set_random_seed(0)

SEQUENCE_LENGTH = 256
TRAINING_SEQUENCES = 6144
VALIDATION_SEQUENCES = 128
EPOCHS = 3
BATCH_SIZE = 16
CONTEXT_LENGTHS = [256, 2048, 8192]
NEW_TOKENS = 1024

"""
## Prepare the data

The files are cut into consecutive sequences of 256 characters. The last sequences are for
validation.
"""

paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = "".join(path.read_text(errors="ignore") for path in paths)
sequences = [
    text[start : start + SEQUENCE_LENGTH]
    for start in range(0, len(text) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
]
training = sequences[:TRAINING_SEQUENCES]
validation = sequences[-VALIDATION_SEQUENCES:]
print(f"{len(training)} sequences to train on, {len(validation)} held out")

"""
## Build and train the model

`EfficientCausalLM` is a KerasHub task: `fit` takes strings, and `generate` continues them.
The two models of this guide differ in the attention and in the positions. The gated delta
rule, the default of decoders, gets the order of tokens from its decays and its convolutions
of four positions. Softmax attention gets it from rotary positions.
"""


def build_model(attention, positions):
    backbone = models.EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=256,
        attention=attention,
        positions=positions,
    )
    preprocessor = models.EfficientCausalLMPreprocessor(
        models.EfficientByteTokenizer(), sequence_length=SEQUENCE_LENGTH
    )
    model = models.EfficientCausalLM(backbone, preprocessor)
    steps = EPOCHS * TRAINING_SEQUENCES // BATCH_SIZE
    learning_rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=4e-3, warmup_steps=steps // 20
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        sampler=keras_hub.samplers.TopKSampler(k=5, seed=0),
    )
    return model


model = build_model("gated-delta", positions=None)
history = model.fit(
    training,
    validation_data=(validation,),
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=2,
)
bits = history.history["val_loss"][-1] / np.log(2)
print(f"{bits:.2f} bits per byte on held-out text")

"""
## Generate text
"""

print(model.generate("def ", max_length=160))

"""
## Measure generation

Both models continue a prompt. The time to read the prompt and generate one token is
measured separately, and subtracted. An untrained model takes as long as a trained one, so
the model with softmax is not trained. Its cache grows with the context; the state of the
gated delta rule does not.
"""


def seconds_per_token(model, context_length):
    prompt = (text * (1 + context_length // len(text)))[:context_length]
    times = []
    for new_tokens in (1, 1 + NEW_TOKENS):
        length = context_length + new_tokens
        elapsed = []
        # Skip the first call, which compiles.
        for _ in range(4):
            start = time.perf_counter()
            model.generate([prompt], max_length=length, stop_token_ids=None)
            elapsed.append(time.perf_counter() - start)
        times.append(min(elapsed[1:]))
    return (times[1] - times[0]) / NEW_TOKENS


measured = {}
models_to_time = {"gated-delta": model, "softmax": build_model("softmax", "rotary")}
for name, timed in models_to_time.items():
    measured[name] = [seconds_per_token(timed, length) for length in CONTEXT_LENGTHS]
    for length, seconds in zip(CONTEXT_LENGTHS, measured[name]):
        print(f"{name:11} after {length:5} bytes: {1e6 * seconds:.0f} µs per byte")

plt.figure(figsize=(6, 4))
for (name, seconds), colour, mark in zip(
    measured.items(), ("tab:blue", "grey"), ("o-", "s--")
):
    plt.plot(CONTEXT_LENGTHS, np.multiply(seconds, 1e6), mark, color=colour, label=name)
plt.xscale("log", base=2)
plt.xticks(CONTEXT_LENGTHS, [f"{length:,}" for length in CONTEXT_LENGTHS])
plt.xlabel("bytes before")
plt.ylabel("microseconds per byte")
plt.ylim(bottom=0)
plt.legend()
plt.savefig("constant_cost_generation.png", dpi=100, bbox_inches="tight")

"""
![Microseconds per byte after contexts of several lengths](constant_cost_generation.png)

## Conclusion

The state is all that the model stores from its context:
`backbone.get_initial_state(batch_size=1)` shows its tensors, and `backbone.stream(tokens,
state)` reads any number of further tokens. `"retention"`, `"local:window=64"` and
`"linear"` have states of constant size as well: [Choosing a layer](../choosing.md) compares
the bytes of all states, and the time of a generated token.
"""
