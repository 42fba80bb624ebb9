"""Trains a Transformer-VQ on segments of a text and measures bits per byte."""

import math

import keras
import numpy as np
from keras import ops

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

# A model keeps one of these parts of its state from segment to segment.
KEPT = CACHE, WINDOW, NOTHING = "cache", "window", "nothing"
# It keeps these, one after the other, in equal parts of its training.
TRAINED = {kept: (kept,) for kept in KEPT} | {"cache-later": (NOTHING, CACHE)}


class Backbone(EfficientTransformerBackbone):
    """A backbone that keeps a part of its state after each segment.

    Of `kept`, `"cache"` is all: the window's keys, and the sums and counts of the
    codes; `"window"` is the former alone.
    """

    kept = CACHE

    def stream(self, token_ids, state, **options):
        hidden, state = super().stream(token_ids, state, **options)
        return hidden, keep(self.kept, state)


def keep(kept, state, name=""):
    """The state with zeros, those of an empty one, for what is not kept."""
    if isinstance(state, dict):
        return {name: keep(kept, part, name) for name, part in state.items()}
    is_kept = kept == CACHE or (kept == WINDOW and name.startswith("window_"))
    return state if is_kept else ops.zeros_like(state)


def build_model(arguments):
    """A language model of gated attention units with vector-quantised keys."""
    attention = (
        f"vq:num_codes={arguments.codes},window={arguments.window},"
        f"gradient_through_cache={arguments.gradient},"
        "quantize_window=True,relative_positions=True"
    )
    return EfficientCausalLM(
        Backbone(
            vocabulary_size=256,
            num_layers=arguments.units,
            **gated_attention_units(attention, arguments.dim, arguments.key_dim),
            residual=ResidualOptions(norm="rms_norm"),
            embedding="untied",
            use_bias=False,
        )
    )


def bits_per_byte(trained, seed, arguments):
    """Trains a model in one way of `TRAINED` and tests it with each of `KEPT`.

    Returns:
        List of bits per byte, without the first quarter of each document.
    """
    splits = load_splits(arguments.text)
    rows, length = arguments.batch, arguments.segment
    keras.utils.set_random_seed(seed)
    rounds = -(-arguments.steps // arguments.document)
    starts = np.random.default_rng(seed).integers(
        max(1, len(splits["train"]) - arguments.document * length), size=rows * rounds
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
    model = build_model(arguments)
    train(model, TRAINED[trained], training, arguments)
    return [tested(model, kept, test, arguments) for kept in KEPT]


def train(model, parts, training, arguments):
    """Trains on documents, an equal number for each part of the training."""
    rows, length = arguments.batch, arguments.segment
    rounds = len(training) // rows
    optimizer = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(
            arguments.learning_rate, rounds * arguments.document
        ),
        global_clipnorm=1.0,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for part, kept in enumerate(parts, 1):
        first, last = (n * rounds // len(parts) * rows for n in (part - 1, part))
        if first == last:
            continue
        model.backbone.kept = kept
        trainer = TransformerXL(model, rows)
        trainer.compile(optimizer, loss)
        data = Segments(training[first:last], rows, length)
        trainer.fit(data, verbose=arguments.verbose)


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


def tested(model, kept, test, arguments):
    """Bits per byte of documents, without the first quarter of each."""
    model.backbone.kept = kept
    rows = arguments.batch
    data = Segments(test, rows, arguments.segment)
    losses = tested_losses(TransformerXL(model, rows), data)
    first = arguments.document // 4
    loss, weight = losses.reshape(2, -1, arguments.document)[..., first:]
    return float(loss.sum() / weight.sum() / math.log(2))


def tested_losses(model, data):
    """The sums of losses and of weights, per batch of segments."""
    losses = []
    logits = model.predict(data, verbose=0)
    for index, predicted in enumerate(np.split(logits, len(data))):
        _, targets, weights = data[index]
        loss = ops.sparse_categorical_crossentropy(targets, predicted, from_logits=True)
        loss = ops.convert_to_numpy(loss) * weights
        losses.append((loss.sum(), weights.sum()))
    return np.array(losses, "float64").T
