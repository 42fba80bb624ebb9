"""Trains a Universal and a vanilla Transformer, and generates with them."""

import time

import keras
import numpy as np
from keras import ops

from algorithms.data import PAD, START, examples, model_inputs, symbols
from keras_efficient_attn.models import (
    EfficientSeq2SeqLM,
    EfficientTransformerBackbone,
    EmbeddingOptions,
    FeedForwardOptions,
    PositionOptions,
    RecurrenceOptions,
)

VANILLA, UNIVERSAL, ADAPTIVE = "vanilla", "universal", "adaptive"


def build_model(kind, task, arguments):
    """Encoder and decoder; the vanilla model has as many parameters as the others.

    In the paper's form, norms follow the sublayers, and steps have sinusoids.
    """
    paper = arguments.form == "paper"
    options = dict(
        vocabulary_size=symbols(task, arguments.alphabet),
        num_heads=arguments.heads,
        attention=arguments.attention,
        architecture="encoder_decoder",
        positions=PositionOptions(
            "sinusoidal", each_layer=True, max_offset=arguments.position_offset
        ),
        # Scaled, because every layer adds sinusoids of amplitude 1.
        embedding=EmbeddingOptions(scale=True),
        residual="post_norm" if paper else "pre_norm",
    )
    if kind == VANILLA:
        dim = vanilla_dim(arguments)
        backbone = EfficientTransformerBackbone(
            num_layers=arguments.depth,
            hidden_dim=dim,
            intermediate_dim=4 * dim,
            feed_forward="relu",
            **options,
        )
        return EfficientSeq2SeqLM(backbone)
    adaptive = None
    if kind == ADAPTIVE:
        adaptive = {
            "ponder_cost": arguments.ponder_cost,
            "halting_bias": arguments.halting_bias,
        }
    backbone = EfficientTransformerBackbone(
        num_layers=1,
        hidden_dim=arguments.dim,
        intermediate_dim=4 * arguments.dim,
        recurrence=RecurrenceOptions(
            arguments.depth, "sinusoidal" if paper else "learned", adaptive
        ),
        feed_forward=FeedForwardOptions(
            "relu",
            separable_convolution=arguments.transition == "separable_convolution",
        ),
        **options,
    )
    return EfficientSeq2SeqLM(backbone)


def vanilla_dim(arguments):
    """`depth · vanilla_dim² ≈ dim²`, a multiple of twice the heads."""
    unit = 2 * arguments.heads
    return max(unit, round(arguments.dim / arguments.depth**0.5 / unit) * unit)


class Batches(keras.utils.PyDataset):
    """Batches padded to `longest`, so that one compiled program handles all."""

    def __init__(self, task, steps, arguments):
        super().__init__()
        self.task, self.steps, self.arguments = task, steps, arguments

    def __len__(self):
        return self.steps

    def __getitem__(self, i):
        arguments = self.arguments
        lengths = (1 if self.task != "addition" else 3, arguments.train_length)
        pairs = examples(
            self.task, arguments.batch, lengths, arguments.alphabet, (arguments.seed, i)
        )
        return repeat(*model_inputs(*pairs), arguments.train_length + 1)


def repeat(inputs, y, weights, length):
    """The batch with rows padded to `length`."""

    def pad(x):
        return np.pad(x, ((0, 0), (0, length - x.shape[1])))

    return {name: pad(x) for name, x in inputs.items()}, pad(y), pad(weights)


def learning_rate_schedule(arguments):
    """A linear rise over `arguments.warmup` steps, then a cosine down to 0."""
    rate, warmup = arguments.learning_rate, arguments.warmup
    return keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else rate,
        max(1, arguments.steps - warmup),
        warmup_target=rate if warmup else None,
        warmup_steps=warmup,
    )


def train_and_measure(kind, task, arguments):
    """Trains one model.

    Returns:
        Dict of `parameters`, `seconds` of training, and `accuracy`: for each length of
        `arguments.test_lengths`, the share of correctly generated symbols and whole
        sequences; and `ponder`, the encoder's mean steps at each length, or `None`
        without adaptive computation.
    """
    keras.utils.set_random_seed(arguments.seed)
    model = build_model(kind, task, arguments)
    model.compile(
        keras.optimizers.Adam(
            learning_rate_schedule(arguments),
            global_clipnorm=1.0,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        sampler="greedy",
    )
    start = time.perf_counter()
    model.fit(
        Batches(task, arguments.steps, arguments),
        verbose=arguments.verbose,
        shuffle=False,
    )
    seconds = time.perf_counter() - start
    sources = {
        length: examples(
            task,
            arguments.test_sequences,
            (length, length),
            arguments.alphabet,
            (arguments.seed + 1, length),
        )
        for length in arguments.test_lengths
    }
    return {
        "parameters": model.count_params(),
        "seconds": seconds,
        "accuracy": measure(model, sources),
        "ponder": ponder(model.backbone, sources) if kind == ADAPTIVE else None,
    }


def measure(model, pairs):
    """Shares of correct symbols and sequences with greedy generation.

    Args:
        model: The trained model.
        pairs: Dict from lengths to sources and targets, the same number of sequences
            for each length, as one batch.
    """
    sources = [row for rows, _ in pairs.values() for row in rows]
    targets = [row for _, rows in pairs.values() for row in rows]
    inputs, y, weights = model_inputs(sources, targets)
    generated = generate(model, inputs, y.shape[1])
    results = {}
    parts = (np.split(x, len(pairs)) for x in (generated == y, weights > 0))
    for length, right, asked in zip(pairs, *parts, strict=True):
        results[length] = right[asked].mean(), (right | ~asked).all(-1).mean()
    return results


def generate(model, inputs, length):
    """Generates greedily: always appends the most likely symbol.

    Args:
        model: The trained model.
        inputs: Inputs of the model; the decoder's are ignored.
        length: Symbols per row.

    Returns:
        int32 `(batch, length)`.
    """
    tokens = np.full((len(inputs["encoder_token_ids"]), 1 + length), PAD, "int32")
    tokens[:, 0] = START
    prompt = {"decoder_token_ids": tokens, "decoder_padding_mask": tokens == START}
    generated = model.generate({**inputs, **prompt}, stop_token_ids=None)
    return generated["decoder_token_ids"][:, 1:]


def ponder(backbone, pairs):
    """Dict from lengths to the mean steps of the encoder's positions."""
    means = {}
    for length, (sources, _) in pairs.items():
        x = backbone.embedding(np.stack(sources).astype("int32"))
        _, statistics = backbone.encoder(x, return_ponder=True)
        means[length] = float(ops.convert_to_numpy(statistics["steps"]).mean())
    return means
