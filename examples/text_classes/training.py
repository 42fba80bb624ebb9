"""Trains a classifier and measures it."""

import time

import keras
import numpy as np

from keras_efficient_attn.models import (
    EfficientTextClassifier,
    EfficientTransformerBackbone,
)
from step_clock import StepClock
from text_classes import data


def make_model(attention, num_classes, arguments):
    """A small encoder of bytes; short convolutions encode their order.

    Raises:
        ValueError: If the attention is unknown or its options invalid.
    """
    backbone = EfficientTransformerBackbone(
        vocabulary_size=256,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden_dim=arguments.dim,
        intermediate_dim=4 * arguments.dim,
        attention=attention,
        architecture="encoder",
        convolution=4,
        dropout=0.1,
    )
    model = EfficientTextClassifier(backbone, num_classes)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - arguments.steps // 10),
        warmup_target=arguments.learning_rate,
        warmup_steps=max(1, arguments.steps // 10),
    )
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=0.01))
    return model


def train_and_measure(attention, texts, arguments):
    """Trains one model.

    Returns:
        Dict of the attention's name, `accuracy` on the held-out windows, their number,
        `seconds_per_step` (the median, without the first, which compiles), `seconds` of
        the whole training, and `parameters`.
    """
    keras.utils.set_random_seed(arguments.seed)
    model = make_model(attention, len(texts.labels), arguments)
    clock = StepClock()
    start = time.perf_counter()
    model.fit(
        data.batches(texts, arguments.length, arguments.batch, arguments.seed),
        steps_per_epoch=arguments.steps,
        callbacks=[clock],
        verbose=arguments.verbose,
    )
    seconds = time.perf_counter() - start
    inputs, labels = data.test_windows(texts, arguments.length, arguments.test_windows)
    logits = model.predict(inputs, batch_size=arguments.batch, verbose=0)
    return {
        "attention": attention,
        "accuracy": float(np.mean(logits.argmax(-1) == labels)),
        "windows": len(labels),
        "seconds_per_step": clock.median,
        "seconds": seconds,
        "parameters": model.count_params(),
    }
