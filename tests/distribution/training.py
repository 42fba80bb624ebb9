"""Small models whose layers have all kinds of trained state, and their data."""

import functools
import sys
from pathlib import Path

import keras
import numpy as np

from keras_efficient_attn.layers import attention_names
from keras_efficient_attn.models import EfficientTransformerBackbone

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LENGTH, STEPS, BATCH = 12, 5, 8
# Larger steps would let rounding errors choose other codes and buckets.
LEARNING_RATE = 0.02
# Codes drawn from the first batch would use the first replica's keys only. The large
# weight makes the commitment a good part of the loss.
CODES = (
    "vq:window=4,num_codes=4,"
    "codes={'init':'random','momentum':0.8,'commitment_weight':0.5}"
)
REDRAWN = "performer:num_features=16,redraw_interval=2"
OPTIONS = {
    "vq": CODES,
    "performer": REDRAWN,
    "adaptive-span": "adaptive-span:max_span=8,ramp=4,penalty=0.1",
    "linear": "linear:feature_map=hedgehog",
    "local": "local:window=4",
    "sparse": "sparse:stride=4",
}
# Every registered layer.
ATTENTION = [OPTIONS.get(name, name) for name in attention_names()]
# Codes die after one call without a key.
REVIVED = ["vq:window=4,num_codes=16,codes={'init':'random','revive_after':1}"]
UNIVERSAL = dict(
    attention=[REDRAWN], recurrence=dict(num_recurrences=2, adaptive_computation={})
)


def make_model(attention, **options):
    keras.utils.set_random_seed(0)
    backbone = EfficientTransformerBackbone(
        16, len(attention), 2, 8, 16, attention=list(attention), **options
    )
    outputs = keras.layers.Dense(3, name="outputs")(backbone.output)
    return compile_model(keras.Model(backbone.input, outputs), "mse")


def make_byte_model():
    """The language model of `examples/train_byte_lm.py`."""
    sys.path.insert(0, str(EXAMPLES))
    from byte_lm.model import build_model

    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = build_model("linear", layers=1, dim=16, heads=2)
    # DistributedDataParallel does not see the weights of a task of KerasHub.
    return compile_model(keras.Model(model.input, model.output), loss)


def compile_model(model, loss):
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss, jit_compile=False)
    return model


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


def make_byte_batches():
    """`STEPS` pairs of bytes and the bytes after them."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        text = rng.integers(0, 256, (BATCH, LENGTH + 1)).astype("int32")
        mask = np.ones((BATCH, LENGTH), "int32")
        batches.append(({"token_ids": text[:, :-1], "padding_mask": mask}, text[:, 1:]))
    return batches


# In a deeper model, rounding errors grow until a code or a bucket is another.
GROUPS = [tuple(ATTENTION[i : i + 4]) for i in range(0, len(ATTENTION), 4)]
# Functions that make a model and its batches.
MODELS = {
    **{
        f"layers {number}": (functools.partial(make_model, group), make_batches)
        for number, group in enumerate(GROUPS, start=1)
    },
    # Replicas wait twice for each other.
    "two codebooks": (functools.partial(make_model, (CODES, CODES)), make_batches),
    "pondering": (lambda: make_model(**UNIVERSAL), make_batches),
    "bytes": (make_byte_model, make_byte_batches),
}


def fit(model, batches):
    """The losses of the steps, by Keras' training."""
    inputs, targets = zip(*batches, strict=True)
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


def train(name):
    """Losses and weights of a model of `MODELS` after `fit`."""
    make, batches = MODELS[name]
    model = make()
    return fit(model, batches()), weights_of(model)


def weights_of(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


def check_same(received, expected):
    """Losses, and weights with all that training moves, of two runs are the same."""
    (losses, weights), (expected_losses, expected_weights) = received, expected
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert weights.keys() == expected_weights.keys()
    for path, value in weights.items():
        np.testing.assert_allclose(
            value, expected_weights[path], rtol=1e-3, atol=1e-4, err_msg=path
        )


def check_moved(weights, before, part):
    """Training changes the weights whose paths contain `part`."""
    moved = [
        np.abs(weights[path] - x).max() > 1e-2
        for path, x in before.items()
        if part in path
    ]
    assert moved and all(moved), part


def codes_of(weights):
    """The codes of the only layer that has them."""
    (total,) = (x for path, x in weights.items() if path.endswith("codebook/sum"))
    (count,) = (x for path, x in weights.items() if path.endswith("codebook/count"))
    return total / count[..., None]


def check_revived(codes, batches):
    """Codes were revived: without that, training ends with others."""
    never = REVIVED[0].replace("'revive_after':1", "'revive_after':None")
    model = make_model([never])
    fit(model, batches)
    other = codes_of(weights_of(model))
    moved = np.abs(codes - other).max(-1) > 1e-2
    assert moved.any() and not moved.all()
