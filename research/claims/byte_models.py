"""Small causal models of bytes: building, training and testing them."""

import math

import keras
import numpy as np

from byte_lm.data import batches, load_splits, model_inputs
from command_line import UsageError
from keras_efficient_attn.models import EfficientCausalLM, EfficientTransformerBackbone

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def load_text(arguments, longest):
    """The splits of `--text`, each longer than `longest` bytes."""
    splits = load_splits(arguments.text)
    for name, split in splits.items():
        if len(split) <= longest:
            raise UsageError(
                f"--text: the {name} text must be longer than {longest} bytes; "
                f"received {len(split)} bytes"
            )
    return splits


def make_model(attention, seed, arguments, **options):
    """A language model of bytes with random weights of this seed.

    Args:
        attention: As the backbone's: a name, or a list that the blocks cycle through.
        seed: Seed of the weights.
        arguments: The parsed arguments: `layers`, `heads` and `dim`.
        **options: Further ones of the backbone.
    """
    keras.utils.set_random_seed(seed)
    return EfficientCausalLM(
        EfficientTransformerBackbone(
            vocabulary_size=256,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            hidden_dim=arguments.dim,
            intermediate_dim=4 * arguments.dim,
            attention=attention,
            **options,
        )
    )


def compile_model(model, arguments, **options):
    """Compiles a model for Adam, with a warm-up and a cosine decay to zero."""
    warmup = max(1, arguments.steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - warmup),
        warmup_target=arguments.learning_rate,
        warmup_steps=warmup,
    )
    optimizer = keras.optimizers.Adam(schedule, global_clipnorm=1.0)
    model.compile(optimizer, LOSS, **options)


def train(model, text, seed, arguments):
    """Trains a model on rows of `--length` bytes, drawn with this seed."""
    compile_model(model, arguments)
    model.fit(
        batches(text, arguments.length, arguments.batch, seed),
        shuffle=False,
        steps_per_epoch=arguments.steps,
        verbose=0,
    )


def bits_per_byte(model, text, length, scored, windows, longest=None):
    """Mean bits of the last `scored` bytes of windows, spread evenly over the text.

    Args:
        model: The model to test.
        text: Bytes.
        length: Bytes that the model reads.
        scored: How many of them count, at most `length`.
        windows: Their number.
        longest: The most bytes of a window: those of all lengths end in the same
            places. Defaults to `length`.
    """
    ends = np.linspace((longest or length) + 1, len(text), windows).astype(int)
    rows = text[ends[:, None] + np.arange(-length - 1, 0)].astype("int32")
    # As many bytes at a time for any length, and at most 64 rows.
    size = min(64, max(1, 8192 // length))
    nats = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        logits = model.predict_on_batch(model_inputs(part[:, :-1]))
        nats.append(
            keras.ops.convert_to_numpy(
                keras.losses.sparse_categorical_crossentropy(
                    part[:, -scored:], logits[:, -scored:], from_logits=True
                )
            )
        )
    return float(np.concatenate(nats).mean()) / math.log(2)
