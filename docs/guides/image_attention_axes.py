"""
Title: Attend over the rows and columns of an image
Description: An image classifier whose attention takes images as they are.
"""

"""
## Introduction

`attention_axes` of Keras' `MultiHeadAttention` names the axes of the input to attend over.
The layers of this package have this argument as well. An image `(batch, rows, columns,
channels)` need not be reshaped to a sequence. Its positions may be single pixels or small
patches, because the cost of most layers does not grow quadratically with their number.

In this guide, a classifier of handwritten digits attends in three ways: over all pixels
with linear attention, over nearby pixels in rectangles, and, for comparison, over all
pixels with softmax, whose cost grows quadratically. The digits come with scikit-learn, so
there is nothing to download.

## Setup
"""

import time

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from keras_efficient_attn import LocalAttention, PerformerAttention, SoftmaxAttention

keras.utils.set_random_seed(0)

SIZE = 24
TRAINING_IMAGES = 800
VALIDATION_IMAGES = 200
EPOCHS = 8

"""
## Prepare the data

The 8 × 8 digits are enlarged to 24 × 24, which makes 576 positions.
"""

digits = load_digits()
images = keras.ops.image.resize(
    digits.images[..., None].astype("float32") / 16, (SIZE, SIZE)
)
images = keras.ops.convert_to_numpy(images)
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order], digits.target[order]
training = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]
end = TRAINING_IMAGES + VALIDATION_IMAGES
validation = images[TRAINING_IMAGES:end], labels[TRAINING_IMAGES:end]
print(f"{len(training[0])} images to train on, {len(validation[0])} held out")

"""
## Build the models

Each pixel is a position. Learned vectors, one for each row and column, encode its place.
`attention_axes=(1, 2)` attends over both axes of the image. `LocalAttention` takes images
without this argument: a `query_block` of two sizes is a rectangle, and `memory` is the
number of rows and columns around it that are visible too.
"""

ATTENTION = {
    "all pixels, linear": lambda: PerformerAttention(
        num_heads=2, key_dim=16, feature_map="hyperbolic", attention_axes=(1, 2)
    ),
    "rectangles": lambda: LocalAttention(
        num_heads=2, key_dim=16, query_block=(8, 8), memory=(2, 2)
    ),
    "all pixels, softmax": lambda: SoftmaxAttention(
        num_heads=2, key_dim=16, attention_axes=(1, 2)
    ),
}


class Places(keras.layers.Layer):
    """Adds a learned vector for the row and one for the column."""

    def build(self, shape):
        _, rows, columns, dim = shape
        self.row = self.add_weight(shape=(rows, 1, dim), initializer="random_normal")
        self.column = self.add_weight(
            shape=(1, columns, dim), initializer="random_normal"
        )

    def call(self, x):
        return x + self.row + self.column


def build_classifier(make_attention, dim=32):
    inputs = keras.Input((SIZE, SIZE, 1))
    x = Places()(keras.layers.Dense(dim)(inputs))
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + make_attention()(y, y)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(2 * dim, activation="gelu")(y)
        x = x + keras.layers.Dense(dim)(y)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


"""
## Train them
"""

accuracy = {}
for name, make_attention in ATTENTION.items():
    model = build_classifier(make_attention)
    model.train_on_batch(training[0][:32], training[1][:32])  # It compiles.
    start = time.perf_counter()
    history = model.fit(
        *training, validation_data=validation, batch_size=32, epochs=EPOCHS, verbose=0
    )
    seconds = (time.perf_counter() - start) / EPOCHS
    accuracy[name] = history.history["val_accuracy"]
    print(f"{name:20} {seconds:.1f} s per epoch, accuracy {accuracy[name][-1]:.3f}")

plt.figure(figsize=(6, 4))
for name, values in accuracy.items():
    plt.plot(range(1, EPOCHS + 1), values, label=name)
plt.xlabel("epoch")
plt.ylabel("accuracy on held-out images")
plt.legend()
plt.savefig("image_attention_axes.png", dpi=100, bbox_inches="tight")

"""
![Accuracy on held-out images over the epochs](image_attention_axes.png)

## Look at the attention

The last attention layer returns its weights: for each pixel, weights over the image. All
layers can return them, even those that never form this matrix in training.
"""

layer = next(
    layer for layer in reversed(model.layers) if isinstance(layer, SoftmaxAttention)
)
features = keras.Model(model.input, layer.input[0])(validation[0][:1])
_, scores = layer(features, features, return_attention_scores=True)
print(f"scores: {tuple(scores.shape)}: batch, heads, rows and columns twice")

"""
## Conclusion

`attention_axes` works for videos as well: `(1, 2, 3)` attends over frames, rows and
columns, and `(1,)` over frames only, separately for each pixel. All other axes are treated
as batch axes.
"""
