"""
Title: Classify long documents
Description: A classifier of 4,096-byte documents, against one with softmax attention.
"""

"""
## Introduction

Softmax attention compares every position of a document with every other position: twice
the length is four times the work. `LocalAttention` compares each position with those near
it, in time that grows with the length, so that a classifier can read a whole document, not
its first 512 tokens.

Here a model predicts which package of the Python standard library a file belongs to. The
files come with Python, so there is nothing to download.

## Setup
"""

import random
import sysconfig
import time
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np

from keras_efficient_attn import models

keras.utils.set_random_seed(0)

LABELS = ["asyncio", "email", "encodings", "idlelib", "unittest", "xml"]
DOCUMENT_LENGTH = 4096
TRAINING_DOCUMENTS = 384
VALIDATION_DOCUMENTS = 96
EPOCHS = 6

"""
## Prepare the data

A document is a window of 4,096 bytes from somewhere in a file. Every fourth file is held
out for validation: no document of it is ever trained on.
"""


def read_files(label):
    folder = Path(sysconfig.get_path("stdlib"), label)
    files = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return [text for text in files if len(text) > 256]


def draw_documents(files_by_label, number, seed):
    generator = random.Random(seed)
    documents, labels = [], []
    for i in range(number):
        label = i % len(files_by_label)
        text = generator.choice(files_by_label[label])
        start = generator.randrange(max(1, len(text) - DOCUMENT_LENGTH))
        document = text[start : start + DOCUMENT_LENGTH]
        documents.append(document.decode("utf-8", errors="ignore"))
        labels.append(label)
    return documents, np.array(labels)


files = [read_files(label) for label in LABELS]
held_out = [texts[::4] for texts in files]
kept = [[text for i, text in enumerate(texts) if i % 4] for texts in files]
training_texts, training_labels = draw_documents(kept, TRAINING_DOCUMENTS, seed=1)
validation_texts, validation_labels = draw_documents(
    held_out, VALIDATION_DOCUMENTS, seed=2
)
print(f"{len(training_texts)} documents to train on, {len(validation_texts)} held out")

"""
## Build the model

The tokenizer makes one token of each byte, and pads shorter documents. The padding is
masked: its positions are never attended to, and the final mean excludes them.

A window of 128 is the default attention of encoders. Any other registered layer can
replace it by name: `"performer"`, `"vq:window=64,num_codes=128"` or `"softmax"`.
"""


def build_classifier(attention):
    backbone = models.EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        attention=attention,
        positions="rotary",
        architecture="encoder",
    )
    preprocessor = models.EfficientTextClassifierPreprocessor(
        models.EfficientByteTokenizer(), sequence_length=DOCUMENT_LENGTH
    )
    classifier = models.EfficientTextClassifier(
        backbone, num_classes=len(LABELS), preprocessor=preprocessor
    )
    classifier.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return classifier


"""
## Compare the time of a step

Both classifiers have the same weights. One step of training on eight documents:
"""


def seconds_per_step(attention):
    classifier = build_classifier(attention)
    times = []
    # Skip the first step, which compiles.
    for _ in range(4):
        start = time.perf_counter()
        classifier.train_on_batch(training_texts[:8], training_labels[:8])
        times.append(time.perf_counter() - start)
    return min(times[1:])


for attention in ("local:window=128", "softmax"):
    print(f"{attention:17}: {seconds_per_step(attention):.2f} s per step")

"""
## Train it
"""

classifier = build_classifier("local:window=128")

history = classifier.fit(
    training_texts,
    training_labels,
    validation_data=(validation_texts, validation_labels),
    batch_size=8,
    epochs=EPOCHS,
    verbose=2,
)

"""
## Look at the accuracy
"""

plt.figure(figsize=(6, 4))
plt.plot(history.history["accuracy"], "o-", label="training")
plt.plot(history.history["val_accuracy"], "s-", label="validation")
plt.axhline(1 / len(LABELS), color="grey", linestyle="--", label="chance")
plt.xlabel("epoch")
plt.ylabel("accuracy")
plt.legend()
plt.savefig("long_document_classifier.png", dpi=100, bbox_inches="tight")

accuracy = history.history["val_accuracy"][-1]
print(f"accuracy on held-out files: {accuracy:.3f}; chance: {1 / len(LABELS):.3f}")

"""
![Accuracy of training and validation over the epochs](long_document_classifier.png)

## Conclusion

A drop-in layer reads whole documents in time that grows linearly. To see what another
layer does with the same documents, change only `attention`. To measure its cost and its
memory on your machine, run

```
python -m keras_efficient_attn.benchmark --layers softmax local:window=128 \
    --lengths 512 4096 --mode train
```
"""
