"""Trains a model of images, measures it and samples from it."""

import dataclasses
import math

import keras
import keras_hub
import numpy as np

from images.data import batches, model_inputs
from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientTransformerBackbone,
    PositionOptions,
)
from step_clock import StepClock

NAMES = ("local2d", "local2d-blocks", "local1d", "strided", "fixed", "softmax")


def attention_name(name, images):
    """Converts one of `NAMES` to a name with options for `get_attention`.

    Strides and blocks are the image's rows; other names are unchanged.
    """
    rows, columns = images.rows, images.columns
    height, width = rectangle(images)
    local2d = (
        f"local:query_block=({height},{width}),memory=({height},{width}),"
        f"grid=({rows},{columns})"
    )
    return {
        "local2d": local2d,
        "local2d-blocks": f"{local2d},grid_order=block",
        "local1d": f"local:query_block={columns},memory={columns}",
        "strided": f"sparse:pattern=strided,stride={columns}",
        "fixed": f"sparse:pattern=fixed,stride={columns},summary={max(1, width // 2)}",
    }.get(name, name)


def rectangle(images):
    """Rows and columns of a query block: a quarter of the image's."""
    return max(1, images.rows // 4), max(1, images.columns // 4)


def order_of(name, images):
    """The model's order of an image's values, as indices.

    Row by row; with `"local2d-blocks"` rectangle by rectangle, as in Image Transformer.

    Raises:
        ValueError: If rectangles do not divide the image.
    """
    order = np.arange(images.length)
    if name != "local2d-blocks":
        return order
    height, width = rectangle(images)
    if images.rows % height or images.columns % width:
        raise ValueError(
            f"rectangles of {height} x {width} values must divide the image; received "
            f"an image of {images.rows} x {images.columns} values"
        )
    order = order.reshape(images.rows // height, height, -1, width)
    return order.transpose(0, 2, 1, 3).ravel()


def make_model(name, images, arguments):
    """A causal model of the values of an image.

    Raises:
        ValueError: If the attention is unknown or its options invalid.
    """
    model = EfficientCausalLM(
        EfficientTransformerBackbone(
            **sizes(images, arguments), attention=attention_name(name, images)
        )
    )
    compile_model(model, arguments)
    return model


def sizes(images, arguments):
    """The arguments of a backbone for images, except its attention."""
    return dict(
        # The last token is the start token.
        vocabulary_size=images.levels + 1,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden_dim=arguments.dim,
        intermediate_dim=4 * arguments.dim,
        positions=PositionOptions("learned", max_length=images.length + 1),
        embedding="untied",
    )


def compile_model(model, arguments):
    """Compiles for training: AdamW with a warmup and a decay."""
    warmup = max(1, arguments.steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - warmup),
        warmup_target=arguments.learning_rate,
        warmup_steps=warmup,
    )
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )


def train_and_measure(name, images, arguments):
    """Trains one model.

    Returns:
        `(model, result)`: a dict of the attention's name, `bits` per dimension on the
        held-out images, their number, `seconds_per_step` (the median, without the
        first, which compiles) and `parameters`.
    """
    keras.utils.set_random_seed(arguments.seed)
    model = make_model(name, images, arguments)
    order = order_of(name, images)
    images = dataclasses.replace(
        images, train=images.train[:, order], test=images.test[:, order]
    )
    clock = StepClock()
    model.fit(
        batches(images, arguments.batch, arguments.seed),
        steps_per_epoch=arguments.steps,
        callbacks=[clock],
        verbose=arguments.verbose,
    )
    test = images.test[: arguments.test_images]
    nats = model.evaluate(
        model_inputs(test, images.levels),
        test.astype("int32"),
        batch_size=arguments.batch,
        verbose=0,
    )
    return model, {
        "attention": name,
        "bits": float(np.ravel(nats)[0]) / math.log(2),
        "images": len(test),
        "seconds_per_step": clock.median,
        "parameters": model.count_params(),
    }


def complete(model, originals, given, images, order, seed):
    """Completes images from their first values, value by value.

    Args:
        model: From `train_and_measure`.
        originals: Integers `(batch, rows · columns)`, row by row.
        given: Number of values of each image that are given, the first ones in the
            model's order; with 0, whole images are sampled.
        images: The `Images` that the model was trained on.
        order: From `order_of`.
        seed: Seed of the samples.

    Returns:
        Integers `(batch, rows · columns)`.
    """
    sampler = keras_hub.samplers.RandomSampler(seed=seed)
    model.compile(sampler=sampler)
    shape = len(originals), images.length + 1
    tokens = np.full(shape, images.levels, "int32")
    tokens[:, 1 : 1 + given] = originals[:, order[:given]]
    mask = np.zeros_like(tokens)
    mask[:, : 1 + given] = 1
    generated = model.generate(
        {"token_ids": tokens, "padding_mask": mask}, stop_token_ids=None
    )
    values = np.asarray(generated["token_ids"])[:, 1:]
    # The start token is not a value.
    return np.minimum(values, images.levels - 1)[:, np.argsort(order)]
