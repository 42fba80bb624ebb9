"""A small model whose layers have all kinds of trained state, and its data."""

import keras
import numpy as np

from keras_efficient_attn.models import EfficientTransformerBackbone

LENGTH, STEPS, BATCH = 12, 5, 8
LEARNING_RATE = 0.1
# Codes drawn from the first batch would use the first replica's keys only.
ATTENTION = [
    "vq:window=4,num_codes=4,decay=0.8,codebook_init='random'",
    "performer:num_features=16,redraw_interval=2",
    "adaptive-span:max_span=8,ramp=4",
]


def make_model(attention=ATTENTION, **options):
    keras.utils.set_random_seed(0)
    backbone = EfficientTransformerBackbone(
        16, len(attention), 2, 8, 16, attention=attention, **options
    )
    return keras.Model(
        backbone.input, keras.layers.Dense(3, name="outputs")(backbone.output)
    )


def make_batches():
    """`STEPS` pairs of inputs and targets, with padding.

    Rows of a batch have equal lengths. Otherwise a mean over existing keys (the
    commitment loss) would differ between replicas and from their mean.
    """
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        lengths = np.full((BATCH, 1), rng.integers(LENGTH // 2, LENGTH))
        inputs = {
            "token_ids": rng.integers(0, 16, (BATCH, LENGTH)).astype("int32"),
            "padding_mask": (np.arange(LENGTH) < lengths).astype("int32"),
        }
        targets = rng.normal(size=(BATCH, LENGTH, 3)).astype("float32")
        batches.append((inputs, targets))
    return batches


def fit(model):
    """The losses of the steps, by Keras' training."""
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse", jit_compile=False)
    inputs, targets = zip(*make_batches(), strict=True)
    inputs = {k: np.concatenate([x[k] for x in inputs]) for k in inputs[0]}
    losses = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: losses.append(logs["loss"])
    )
    model.fit(
        inputs,
        np.concatenate(targets),
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[record],
    )
    # Keras reports the mean over the steps so far.
    sums = np.array(losses) * np.arange(1, STEPS + 1)
    return np.diff(sums, prepend=0.0)


def weights_of(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


def check_same(weights, expected):
    """Weights, codes, projections, counters and spans of two runs are the same."""
    assert any("projection" in path for path in weights)
    for path, value in weights.items():
        np.testing.assert_allclose(
            value, expected[path], rtol=1e-3, atol=1e-4, err_msg=path
        )
