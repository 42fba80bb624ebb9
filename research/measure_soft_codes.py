"""Compares hard, soft, random and fitted codes for the keys of a trained model.

    python research/measure_soft_codes.py --backend jax

A small causal model of bytes is trained with softmax on the source of the Python
standard library. Then its attention layers use codes for all keys, with the trained
projections: as many Performer features; soft codes at random projections; the nearest
of random codes; k-means; and mixtures of Gaussians with individual widths and weights,
fitted by expectation-maximisation and then by gradient descent to the outputs of
softmax. The table has the relative error of the layers' outputs, and bits per byte of
held-out text, mean and standard deviation over the seeds.
"""

import math
import sys

import folders  # noqa: F401
from byte_lm.data import batches, load_splits
from claims.arguments import SEEDS
from command_line import Parser, command, positive
from tables import mean_and_spread, show

PERFORMER, SOFT_RANDOM, HARD_RANDOM = "performer", "soft, random", "hard, random"
K_MEANS, EM, GRADIENT = "hard, k-means", "soft, EM", "soft, gradient"
NAMES = (PERFORMER, SOFT_RANDOM, HARD_RANDOM, K_MEANS, EM, GRADIENT)


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--codes", nargs="+", type=positive, default=[16, 64, 256])
    parser.add_seeds(SEEDS)
    add("--length", type=positive, default=128)
    parser.add_model_size(dim=64, heads=2, layers=2)
    parser.add_training(steps=400, batch=8, learning_rate=3e-3)
    add("--fit-steps", type=positive, default=100, help="of the fit by gradient")
    add("--windows", type=positive, default=32, help="held out, to measure on")
    parser.add_save()
    return parser.parse_args(argv)


def make_model(attention, arguments):
    """A causal model of bytes with this attention."""
    from keras_efficient_attn.models import (
        EfficientCausalLM,
        EfficientTransformerBackbone,
    )

    return EfficientCausalLM(
        EfficientTransformerBackbone(
            256,
            arguments.layers,
            arguments.heads,
            arguments.dim,
            4 * arguments.dim,
            attention=attention,
            positions="sinusoidal",
        )
    )


def train(splits, seed, arguments):
    """A model trained with softmax."""
    import keras

    keras.utils.set_random_seed(seed)
    model = make_model("softmax", arguments)
    model.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(
                arguments.learning_rate, arguments.steps
            ),
            global_clipnorm=1.0,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    model.fit(
        batches(splits["train"], arguments.length, arguments.batch, seed),
        steps_per_epoch=arguments.steps,
        verbose=0,
    )
    return model


def attention_inputs(model, tokens):
    """The input of each attention layer, arrays `(batch, length, dim)`."""
    from keras import ops

    x, inputs = model.backbone.embedding(tokens), []
    for block in model.backbone.transformer_layers:
        inputs.append(ops.convert_to_numpy(block.attention_residual.before(x)))
        x = block(x)
    return inputs


def make_layer(name, codes, seed, arguments):
    """An attention layer with `codes` codes or features for all keys."""
    from keras_efficient_attn import CodeOptions, PerformerAttention, VQAttention

    sizes = arguments.heads, arguments.dim // arguments.heads
    if name == PERFORMER:
        return PerformerAttention(*sizes, num_features=codes, seed=seed)
    options = dict(num_codes=codes, window=None, qk_norm=False, seed=seed)
    if name in (HARD_RANDOM, K_MEANS):
        return VQAttention(*sizes, codes=CodeOptions(init="random"), **options)
    mixture = CodeOptions("soft", learn_sigma=True, learn_weights=True)
    return VQAttention(*sizes, codes=mixture, **options)


def convert(name, codes, teacher, inputs, seed, arguments):
    """The teacher with another attention, and its layers' relative errors.

    Args:
        name: One of `NAMES`.
        codes: Number of codes.
        teacher: The trained model.
        inputs: Pair of lists of its layers' inputs, to fit to and to measure on.
        seed: Seed of random codes and projections.
        arguments: The parsed arguments.
    """
    import numpy as np
    from keras import ops

    model = make_model(make_layer(name, codes, seed, arguments), arguments)
    trained = {weight.path: weight for weight in teacher.weights}
    for weight in model.weights:
        if weight.path in trained:
            # A copy: on JAX, training donates the buffer of a weight.
            weight.assign(ops.convert_to_numpy(trained[weight.path]).copy())
    errors = []
    blocks = model.backbone.transformer_layers, teacher.backbone.transformer_layers
    for student, softmax, data, test in zip(*blocks, *inputs, strict=True):
        layer, reference = student.attention, softmax.attention
        if name == SOFT_RANDOM:
            at_random(layer, seed)
        if name in (K_MEANS, EM, GRADIENT):
            layer.calibrate(data)
        if name == GRADIENT:
            fit_by_gradient(layer, reference, data, arguments)
        expected, received = (
            ops.convert_to_numpy(layer(test, test, use_causal_mask=True))
            for layer in (reference, layer)
        )
        residual = np.linalg.norm(received - expected)
        errors.append(residual / np.linalg.norm(expected))
    return model, float(np.mean(errors))


def at_random(layer, seed):
    """Sets the mixture whose shares are Performer's normalised features."""
    import numpy as np

    mixture = {weight.name: weight for weight in layer.weights}
    drawn = np.random.default_rng(seed).normal(size=mixture["codes"].shape)
    mixture["codes"].assign(drawn)
    mixture["log_sigma"].assign(np.zeros(drawn.shape[:2]))
    mixture["log_weights"].assign(np.square(drawn).sum(-1) / 2)


def fit_by_gradient(layer, reference, data, arguments):
    """Trains codes, widths and weights to match the outputs of softmax."""
    import keras

    projections = ("query_dense", "key_dense", "value_dense", "output_dense")
    for projection in projections:
        getattr(layer, projection).trainable = False
    x = keras.Input(data.shape[1:])
    model = keras.Model(x, layer(x, x, use_causal_mask=True))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    expected = reference(data, data, use_causal_mask=True)
    expected = keras.ops.convert_to_numpy(expected)
    epochs = math.ceil(arguments.fit_steps * 8 / len(data))
    model.fit(data, expected, batch_size=8, epochs=epochs, verbose=0)


def bits_per_byte(model, inputs, targets):
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return float(loss(targets, model.predict(inputs, verbose=0))) / math.log(2)


@command(parse_arguments)
def main(arguments):
    """Trains, converts and prints the table."""
    splits, results = load_splits(), {}
    for seed in arguments.seeds:
        teacher = train(splits, seed, arguments)
        test = batches(splits["test"], arguments.length, arguments.windows, seed=0)
        test_inputs, targets = next(test)
        fit_inputs, _ = next(batches(splits["train"], arguments.length, 64, seed + 99))
        inputs = [
            attention_inputs(teacher, part["token_ids"])
            for part in (fit_inputs, test_inputs)
        ]
        softmax = bits_per_byte(teacher, test_inputs, targets)
        results.setdefault(("softmax", 0), []).append((0.0, softmax))
        for codes in arguments.codes:
            for name in NAMES:
                model, error = convert(name, codes, teacher, inputs, seed, arguments)
                bits = bits_per_byte(model, test_inputs, targets)
                results.setdefault((name, codes), []).append((error, bits))
                print(f"{seed} {name} {codes}: {error:.3f} {bits:.3f}", flush=True)
    rows = [
        [*key, *(mean_and_spread(x, 3) for x in zip(*measured, strict=True))]
        for key, measured in results.items()
    ]
    show(["keys", "codes", "error", "bits per byte"], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
