"""Image upscaling: an encoder reads small images, a decoder writes large ones."""

import math

import keras
import keras_hub
import numpy as np

from command_line import UsageError
from images.data import model_inputs
from images.model import attention_name, compile_model, sizes
from keras_efficient_attn.models import EfficientSeq2SeqLM, EfficientTransformerBackbone


def shrink(values, images, factor):
    """The means of squares of `factor` by `factor` values, as integers.

    Args:
        values: Integers `(count, rows · columns)`.
        images: Their `Images`.
        factor: Rows and columns of a square.

    Returns:
        Integers `(count, rows · columns / factor²)`.

    Raises:
        UsageError: If squares do not divide the image.
    """
    rows, columns = images.rows, images.columns
    if rows % factor or columns % factor:
        raise UsageError(
            f"--factor {factor} does not divide images of {rows} x {columns} values"
        )
    squares = values.reshape(-1, rows // factor, factor, columns // factor, factor)
    means = np.rint(squares.mean(axis=(2, 4)))
    return means.astype("int32").reshape(len(values), -1)


def enlarge(values, images, factor):
    """Each value as a square of `factor` by `factor`, the inverse of `shrink`."""
    grid = values.reshape(-1, images.rows // factor, images.columns // factor)
    return grid.repeat(factor, 1).repeat(factor, 2).reshape(len(values), -1)


def seq2seq_inputs(small, values, start):
    """The inputs of encoder (small images) and decoder (earlier values)."""
    decoder = model_inputs(values, start)
    return {
        "encoder_token_ids": small,
        "encoder_padding_mask": np.ones_like(small),
        **{f"decoder_{name}": tensor for name, tensor in decoder.items()},
    }


def make_model(name, images, arguments):
    """An encoder of the small image, with softmax, and a decoder with `name`.

    Raises:
        ValueError: If the attention is unknown or its options invalid.
    """
    backbone = EfficientTransformerBackbone(
        **sizes(images, arguments),
        architecture="encoder_decoder",
        attention=attention_name(name, images),
        encoder_attention="softmax",
    )
    model = EfficientSeq2SeqLM(backbone)
    compile_model(model, arguments)
    return model


def train_and_measure(name, images, arguments):
    """Trains one model.

    Returns:
        `(model, result)`: a dict of the attention's name, `bits` per dimension of
        held-out images, `bits_of_another` with another image in the encoder, the root
        mean square `error` of one sample per image, `squares`, the error of the small
        image with enlarged pixels, and `parameters`.
    """
    keras.utils.set_random_seed(arguments.seed)
    model = make_model(name, images, arguments)
    model.fit(
        batches(images, arguments),
        steps_per_epoch=arguments.steps,
        verbose=arguments.verbose,
    )
    test = images.test[: arguments.test_images].astype("int32")
    small = shrink(test, images, arguments.factor)

    def bits(small):
        nats = model.evaluate(
            seq2seq_inputs(small, test, images.levels),
            test,
            batch_size=arguments.batch,
            verbose=0,
        )
        return float(np.ravel(nats)[0]) / math.log(2)

    result = {
        "attention": name,
        "bits": bits(small),
        "bits_of_another": bits(np.roll(small, 1, axis=0)),
        "error": error(sample(model, small, images, arguments.seed), test),
        "squares": error(enlarge(small, images, arguments.factor), test),
        "parameters": model.count_params(),
    }
    return model, result


def batches(images, arguments):
    """Endless `(inputs, targets)`, drawn at random."""
    random = np.random.default_rng(arguments.seed)
    small = shrink(images.train, images, arguments.factor)
    while True:
        chosen = random.integers(0, len(images.train), arguments.batch)
        values = images.train[chosen]
        inputs = seq2seq_inputs(small[chosen], values, images.levels)
        yield inputs, values.astype("int32")


def sample(model, small, images, seed):
    """One large image for each small one, integers `(count, rows · columns)`."""
    model.compile(sampler=keras_hub.samplers.RandomSampler(seed=seed))
    start = np.full((len(small), images.length + 1), images.levels, "int32")
    prompt = {"token_ids": start, "padding_mask": np.zeros_like(start)}
    prompt["padding_mask"][:, 0] = 1
    inputs = {f"decoder_{name}": tensor for name, tensor in prompt.items()}
    inputs |= {"encoder_token_ids": small, "encoder_padding_mask": np.ones_like(small)}
    values = model.generate(inputs, stop_token_ids=None)["decoder_token_ids"][:, 1:]
    # The start token is not a value.
    return np.minimum(values, images.levels - 1)


def error(values, truth):
    """The root mean square difference."""
    return float(np.sqrt(np.mean((values.astype("float64") - truth) ** 2)))
