"""
Title: Classify long documents
Description: Train a classifier of 4,096-byte documents, and the same with softmax.
"""

"""
## Introduction

Softmax attention compares every position of a document with every other position: twice
the length is four times the work. `LocalAttention` compares each position with those near
it, in time that grows with the length, so that a classifier can read a whole document, not
its first 512 tokens.

Here a model predicts which package of the Python standard library a file belongs to. The
files come with Python, so there is nothing to download. The same model is trained with
softmax attention, on the same batches, to see what the window costs in accuracy and what it
saves in time and memory.

## Setup
"""

import random
import sysconfig
import time
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np

from keras_efficient_attn import benchmark, models

LABELS = ["asyncio", "email", "encodings", "idlelib", "unittest", "xml"]
DOCUMENT_LENGTH = 4096
TRAINING_DOCUMENTS = 384
VALIDATION_DOCUMENTS = 96
EPOCHS = 4
CLASSIFIERS = ["local:window=128", "softmax"]

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

A window of 128 is the default attention of encoders. Each position attends to itself and
to the 127 positions on either side; two blocks reach twice as far.
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
## Train both

Both classifiers have the same weights at the start, and see the same batches.
"""


class Stopwatch(keras.callbacks.Callback):
    """Keeps the seconds since the start of the training, epoch by epoch."""

    def on_train_begin(self, logs=None):
        self.start, self.seconds = time.perf_counter(), []

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


seconds, accuracies = {}, {}
for attention in CLASSIFIERS:
    keras.utils.set_random_seed(0)
    classifier = build_classifier(attention)
    stopwatch = Stopwatch()
    history = classifier.fit(
        training_texts,
        training_labels,
        validation_data=(validation_texts, validation_labels),
        batch_size=8,
        epochs=EPOCHS,
        verbose=2,
        callbacks=[stopwatch],
    )
    seconds[attention] = stopwatch.seconds
    accuracies[attention] = history.history["val_accuracy"]

"""
## Compare accuracy and time
"""

plt.figure(figsize=(6, 4))
for attention in CLASSIFIERS:
    plt.plot(seconds[attention], accuracies[attention], "o-", label=attention)
plt.axhline(1 / len(LABELS), color="grey", linestyle="--", label="chance")
plt.xlabel("seconds of training")
plt.ylabel("accuracy on held-out files")
plt.legend()
plt.savefig("long_document_classifier.png", dpi=100, bbox_inches="tight")

for attention in CLASSIFIERS:
    print(
        f"{attention:17} accuracy {accuracies[attention][-1]:.3f}, "
        f"{seconds[attention][-1] / EPOCHS:.0f} s per epoch"
    )

"""
![Accuracy on held-out files over the time of training](long_document_classifier.png)

## Compare the memory

`benchmark.compare` measures layers in processes of their own, so that neither sees what
the other has left in memory. Here it takes one training step of each attention layer, with
the shapes of the classifier:
"""

comparison = benchmark.compare(
    CLASSIFIERS, [DOCUMENT_LENGTH], heads=4, head_dim=16, batch=8, mode="train"
)
for record in comparison.records:
    if record.contestant in CLASSIFIERS:
        print(
            f"{record.contestant:17} {record.memory_bytes / 2**20:.0f} MiB, "
            f"{1000 * record.seconds:.0f} ms"
        )

"""
## Conclusion

The classifier with a window trains 3.5 times as fast: when softmax attention ends its first
epoch with an accuracy of 0.53, the window has seen all documents four times and has 0.78.
With the same number of epochs, softmax is ahead, by eight of 96 documents. Whether the window
catches up with more epochs is for you to try; these figures are of one run.

PyTorch computes softmax attention in blocks and keeps no matrix of all pairs, so memory is
no reason to leave it. On JAX and TensorFlow on CPUs there is no such kernel, and softmax
attention needs memory that grows with the square of the length.

To see what another layer does with the same documents, add it to `CLASSIFIERS`, such as
`"sparse:stride=64"`. The column of packages in [Choosing a layer](../choosing.md) has the
accuracy of most layers in a similar task.
"""
