"""Trains a Transformer-VQ on segments of a text and measures bits per byte."""

import itertools
import math

import keras
import numpy as np

from byte_lm.data import load_splits
from command_line import UsageError
from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    ResidualOptions,
    Segments,
    TransformerXL,
    gated_attention_units,
)

TRAINED = WITH, WITHOUT = "with its cache", "without"
TESTED = tuple(itertools.product(TRAINED, ("all", "later")))


class Forgotten(Segments):
    """Segments that each start a new document."""

    def __getitem__(self, index):
        inputs, targets, weights = super().__getitem__(index)
        return inputs | {"reset": np.ones_like(inputs["reset"])}, targets, weights


def build_model(arguments):
    """A language model of gated attention units with vector-quantised keys."""
    attention = (
        f"vq:num_codes={arguments.codes},window={arguments.window},"
        "quantize_window=True,relative_positions=True"
    )
    return EfficientCausalLM(
        EfficientTransformerBackbone(
            vocabulary_size=256,
            num_layers=arguments.units,
            **gated_attention_units(attention, arguments.dim, arguments.key_dim),
            residual=ResidualOptions(norm="rms_norm"),
            embedding="untied",
            use_bias=False,
        )
    )


def bits_per_byte(trained, seed, arguments):
    """Trains a model in one way and tests it in the ways of `TESTED`.

    Returns:
        List of bits per byte, in the order of `TESTED`.
    """
    splits = load_splits(arguments.text)
    rows, length = arguments.batch, arguments.segment
    keras.utils.set_random_seed(seed)
    count = rows * -(-arguments.steps // arguments.document)
    starts = np.random.default_rng(seed).integers(
        max(1, len(splits["train"]) - arguments.document * length), size=count
    )
    training = documents(splits["train"], starts, arguments)
    size = arguments.document * length
    most = min(arguments.test_bytes, len(splits["test"]))
    starts = np.arange(0, most - size, size)
    test = documents(splits["test"], starts[: len(starts) // rows * rows], arguments)
    if not test:
        raise UsageError(
            f"--test-bytes {arguments.test_bytes}: {most} bytes of test text do not "
            f"hold {rows} documents of {size} bytes"
        )
    model = TransformerXL(build_model(arguments), rows)
    model.compile(
        keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(
                arguments.learning_rate, count // rows * arguments.document
            ),
            global_clipnorm=1.0,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    read = Segments if trained == WITH else Forgotten
    model.fit(read(training, rows, length), verbose=arguments.verbose)
    losses = {
        how: tested_losses(model, data(test, rows, length))
        for how, data in zip(TRAINED, (Segments, Forgotten), strict=True)
    }
    results = []
    for how, part in TESTED:
        first = 0 if part == "all" else arguments.document // 4
        loss, weight = losses[how].reshape(2, -1, arguments.document)[..., first:]
        results.append(float(loss.sum() / weight.sum() / math.log(2)))
    return results


def documents(text, starts, arguments):
    """The documents from these positions; `UsageError` if the text is too short."""
    size = arguments.document * arguments.segment + 1
    if max(starts, default=0) + size > len(text):
        raise UsageError(
            f"--document {arguments.document} is too long: with --segment "
            f"{arguments.segment}, a document has {size} bytes, and the text "
            f"{len(text)}"
        )
    return [text[start : start + size] for start in starts]


def tested_losses(model, data):
    """The sums of losses and of weights, per batch of segments."""
    losses = []
    logits = model.predict(data, verbose=0)
    for index, predicted in enumerate(np.split(logits, len(data))):
        _, targets, weights = data[index]
        loss = keras.ops.sparse_categorical_crossentropy(
            targets, predicted, from_logits=True
        )
        loss = keras.ops.convert_to_numpy(loss) * weights
        losses.append((loss.sum(), weights.sum()))
    return np.array(losses, "float64").T
