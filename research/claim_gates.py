"""Trains GTrXL and Transformer-XL on a memory task at several learning rates.

    python research/claim_gates.py --backend jax

The first symbol of a row says which of two streams to write down: at each position,
two symbols are shown, and the model is to name the one of that stream, as it was some
positions ago. It has to read the first symbol and earlier ones at once. Residual
connections differ, all else is the same: Transformer-XL's (`post_norm`), TrXL-I
(`reordered`), and GTrXL's gates with a bias of 2, as in the paper, and of 0. `scale`
has token embeddings times `√dim`, `norm` a norm after the last block.

    python research/claim_gates.py --backend jax --steps 300 1200

tests each model after 300 steps, and after 900 more. The table has the percentage of
symbols that are named right, the mean and the standard deviation over the seeds, and
how many of all runs reach 90 %, for each number of steps.
"""

import sys

import folders  # noqa: F401
from claims.arguments import SEEDS, parse
from command_line import Parser, command, positive, positive_float
from tables import mean_and_spread, show

# Names, residuals, biases of their gates, whether embeddings are scaled, and whether a
# norm follows the last block.
KINDS = {
    "xl": ("post_norm", None, False, False),
    "trxl-i": ("reordered", None, False, False),
    "trxl-i-scale": ("reordered", None, True, False),
    "trxl-i-norm": ("reordered", None, False, True),
    "trxl-i-scale-norm": ("reordered", None, True, True),
    "gtrxl": ("gated", 2.0, False, False),
    "gtrxl-scale": ("gated", 2.0, True, False),
    "gtrxl-norm": ("gated", 2.0, False, True),
    "gtrxl-scale-norm": ("gated", 2.0, True, True),
    "gtrxl-bias-0": ("gated", 0.0, False, False),
    "gtrxl-bias-0-scale": ("gated", 0.0, True, False),
}


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--learning-rates",
        nargs="+",
        type=positive_float,
        default=[1e-3, 3e-3, 1e-2],
    )
    add("--models", nargs="+", choices=KINDS, default=list(KINDS), metavar="MODEL")
    add("--length", type=positive, default=12, help="of a row")
    add("--delay", type=positive, default=2, help="positions")
    add("--symbols", type=positive, default=4)
    parser.add_model_size(dim=32, heads=2, layers=2)
    add(
        "--steps",
        nargs="+",
        type=positive,
        default=[300],
        help="of training, after which a model is tested",
    )
    add("--batch", type=positive, default=32, help="rows of a batch")
    parser.add_seeds(SEEDS)
    parser.add_save()
    arguments = parse(parser, argv)
    arguments.steps = sorted(set(arguments.steps))
    return arguments


def streams(arguments, seed):
    """Endless batches of the task: inputs, targets and weights."""
    import numpy as np

    from byte_lm.data import model_inputs

    random = np.random.default_rng(seed)
    rows = arguments.batch, arguments.length
    symbols, delay = arguments.symbols, arguments.delay
    while True:
        pairs = random.integers(0, symbols, (2, *rows))
        which = random.integers(0, 2, rows[0])
        # A token is a pair of symbols; two more tokens name the stream.
        tokens = pairs[0] * symbols + pairs[1]
        tokens[:, 0] = symbols**2 + which
        chosen = np.where(which[:, None] == 0, pairs[0], pairs[1])
        targets = np.roll(chosen, delay, axis=1)
        weights = np.zeros(rows, "float32")
        weights[:, delay + 1 :] = 1
        yield model_inputs(tokens), targets.astype("int32"), weights


def make_model(kind, learning_rate, seed, arguments):
    """A causal model with this kind of residual connections, compiled."""
    import keras

    from keras_efficient_attn.models import (
        EfficientCausalLM,
        EfficientTransformerBackbone,
    )

    keras.utils.set_random_seed(seed)
    residual, bias, scale, final_norm = KINDS[kind]
    model = EfficientCausalLM(
        EfficientTransformerBackbone(
            vocabulary_size=arguments.symbols**2 + 2,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            hidden_dim=arguments.dim,
            intermediate_dim=2 * arguments.dim,
            attention="xl",
            residual={"kind": residual, "final_norm": final_norm},
            embedding={"output": "untied", "scale": scale},
        )
    )
    if bias is not None:
        for block in model.backbone.decoder.blocks:
            for part in (block.attention_residual, block.feed_forward_residual):
                set_bias(part.residual, bias)
    model.compile(
        keras.optimizers.Adam(learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


def set_bias(gate, bias):
    """Sets the bias that a `GatedResidual` starts with."""
    import numpy as np

    (weight,) = (weight for weight in gate.weights if weight.name == "bias")
    weight.assign(np.full(weight.shape, bias))


def accuracies(kind, learning_rate, seed, arguments):
    """Trains a model; percentages of right symbols in new rows.

    Returns:
        List of percentages, after each of `arguments.steps`.
    """
    model = make_model(kind, learning_rate, seed, arguments)
    options, data = dict(verbose=0), streams(arguments, seed)
    percentages, trained = [], 0
    for steps in arguments.steps:
        model.fit(data, steps_per_epoch=steps - trained, shuffle=False, **options)
        trained = steps
        test = streams(arguments, 2**32 + seed)
        tested = model.evaluate(test, steps=8, return_dict=True, **options)
        percentages.append(100 * tested["accuracy"])
    return percentages


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    rates, rows = arguments.learning_rates, []
    for kind in arguments.models:
        # By rate, seed and number of steps.
        measured = [
            [accuracies(kind, rate, seed, arguments) for seed in arguments.seeds]
            for rate in rates
        ]
        print(kind, measured, flush=True)
        for i, steps in enumerate(arguments.steps):
            runs = [[seed[i] for seed in seeds] for seeds in measured]
            solved = sum(x >= 90 for seeds in runs for x in seeds)
            number = len(rates) * len(arguments.seeds)
            cells = [mean_and_spread(seeds, 1) for seeds in runs]
            rows.append([kind, steps, *cells, f"{solved} of {number}"])
    header = ["model", "steps", *(f"{rate:g}" for rate in rates), "90 % and more"]
    show(header, rows, arguments)
    print(f"A guess is right in {100 / arguments.symbols:.1f} % of the cases.")


if __name__ == "__main__":
    sys.exit(main())
