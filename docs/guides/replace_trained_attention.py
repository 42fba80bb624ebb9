"""
Title: Replace the attention of a trained encoder
Description: A trained BERT gets linear attention, keeps its weights, and is distilled.
"""

"""
## Introduction

A model that was trained with softmax attention can become cheaper on long inputs without
being trained again from scratch. `convert_backbone` replaces the attention layers of a
trained KerasHub backbone and keeps the trained projections. `distill` then trains the new
layers to reproduce the old ones, without labels.

To avoid a download, this guide first trains a small BERT. With your own model, start at
"Replace the attention".

## Setup
"""

import random
import sysconfig
from pathlib import Path

import keras
import keras_hub
import matplotlib.pyplot as plt
import numpy as np

from keras_efficient_attn import models

keras.utils.set_random_seed(0)

LABELS = ["asyncio", "email", "encodings", "idlelib", "unittest", "xml"]
SEQUENCE_LENGTH = 512
TRAINING_DOCUMENTS = 512
VALIDATION_DOCUMENTS = 128
EPOCHS = 5
DISTILLATION_EPOCHS = 2

"""
## Prepare the data

A document is a window of 512 bytes of a file of the standard library. Its label is the
file's package. Every fourth file is held out.
"""


def draw_documents(held_out, number, seed):
    generator = random.Random(seed)
    tokens = np.zeros((number, SEQUENCE_LENGTH), "int32")
    labels = np.arange(number) % len(LABELS)
    for row, label in zip(tokens, labels):
        folder = Path(sysconfig.get_path("stdlib"), LABELS[label])
        paths = sorted(folder.rglob("*.py"))
        chosen = [path for i, path in enumerate(paths) if (i % 4 == 0) == held_out]
        text = b""
        while len(text) < SEQUENCE_LENGTH // 4:
            text = generator.choice(chosen).read_bytes()
        start = generator.randrange(max(1, len(text) - SEQUENCE_LENGTH))
        document = text[start : start + SEQUENCE_LENGTH]
        row[: len(document)] = np.frombuffer(document, "uint8")
    inputs = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": tokens > 0,
    }
    return inputs, labels


training_inputs, training_labels = draw_documents(False, TRAINING_DOCUMENTS, seed=1)
validation_inputs, validation_labels = draw_documents(
    True, VALIDATION_DOCUMENTS, seed=2
)

"""
## Train the original
"""

original = keras_hub.models.BertBackbone(
    vocabulary_size=256,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    intermediate_dim=128,
    max_sequence_length=SEQUENCE_LENGTH,
)


def add_classifier(backbone, head):
    outputs = keras.layers.GlobalAveragePooling1D()(
        backbone.output["sequence_output"], mask=backbone.input["padding_mask"]
    )
    model = keras.Model(backbone.input, head(outputs))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


head = keras.layers.Dense(len(LABELS))
classifier = add_classifier(original, head)
classifier.fit(
    training_inputs,
    training_labels,
    validation_data=(validation_inputs, validation_labels),
    batch_size=16,
    epochs=EPOCHS,
    verbose=2,
)

"""
## Replace the attention

The nearest 16 keys keep their exact weights; 64 learned features estimate all others. The
original does not change. They start as random features, which shows what distillation does.
[The recipe](../conversion.md#the-recipe) is another: codes that `calibrate` sets from a few
batches, and a wide window.
"""

efficient = models.convert_backbone(
    original, "performer:feature_map=learned,num_features=64,window=16"
)
sample = {name: value[:16] for name, value in validation_inputs.items()}
print(models.swap_report(original, efficient, sample))

"""
## Distil

`distill` calls `fit` in two stages. First, each new layer learns to reproduce the outputs
of its softmax layer. Then low-rank changes of the projections align the hidden states.
Neither stage needs labels.
"""


def accuracy_of(backbone):
    model = add_classifier(backbone, head)
    results = model.evaluate(
        validation_inputs, validation_labels, verbose=0, return_dict=True
    )
    return results["accuracy"]


accuracies = {"original": accuracy_of(original), "converted": accuracy_of(efficient)}
batches = [
    {name: value[start : start + 16] for name, value in training_inputs.items()}
    for start in range(0, TRAINING_DOCUMENTS, 16)
]
models.distill(original, efficient, batches, epochs=DISTILLATION_EPOCHS, verbose=2)
accuracies["distilled"] = accuracy_of(efficient)
print(models.swap_report(original, efficient, sample))

"""
## Compare
"""

for name, accuracy in accuracies.items():
    print(f"{name:10} accuracy on held-out files: {accuracy:.3f}")

plt.figure(figsize=(5, 4))
bars = plt.bar(list(accuracies), list(accuracies.values()), color="tab:blue")
bars[0].set_color("grey")
plt.bar_label(bars, fmt="%.3f")
plt.ylabel("accuracy on held-out files")
plt.ylim(0, 1)
plt.savefig("replace_trained_attention.png", dpi=100, bbox_inches="tight")

"""
![Accuracy of the original, converted and distilled model](replace_trained_attention.png)

## Conclusion

The copy has the inputs and the weight names of the original, and saves, loads and trains
like it. Conversion saves time from the length at which linear attention becomes faster than
softmax on your device; `python -m keras_efficient_attn.benchmark` finds this length.
[Converting a trained model](../conversion.md) describes how to choose layers, windows and
features.
"""
