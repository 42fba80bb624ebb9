"""Trains GTrXL and Transformer-XL on a memory task at several learning rates.

    python research/claim_gates.py --backend jax

The first symbol of a row says which of two streams to write down: at each position,
two symbols are shown, and the model is to name the one of that stream, as it was some
positions ago. It has to read the first symbol and earlier ones at once. Residual
connections differ, all else is the same: Transformer-XL's (`post_norm`), TrXL-I
(`reordered`), and GTrXL's gates with a bias of 2, as in the paper, and of 0. Those that
are scaled have token embeddings times `√dim`, and a norm after the last block. The
table has the percentage of symbols that are named right, the mean and the standard
deviation over the seeds, and how many of all runs reach 90 %.
"""

import sys

import folders  # noqa: F401
from claims.arguments import SEEDS, parse
from command_line import Parser, command, positive, positive_float
from tables import mean_and_spread, show

# Names, residuals, biases of their gates, and whether embeddings are scaled and a norm
# follows the last block.
KINDS = {
    "xl": ("post_norm", None, False),
    "xl-scaled": ("post_norm", None, True),
    "trxl-i": ("reordered", None, False),
    "trxl-i-scaled": ("reordered", None, True),
    "gtrxl": ("gated", 2.0, False),
    "gtrxl-scaled": ("gated", 2.0, True),
    "gtrxl-bias-0-scaled": ("gated", 0.0, True),
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
    add("--steps", type=positive, default=300, help="of training")
    add("--batch", type=positive, default=32, help="rows of a batch")
    parser.add_seeds(SEEDS)
    parser.add_save()
    return parse(parser, argv)


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
    residual, bias, scaled = KINDS[kind]
    model = EfficientCausalLM(
        EfficientTransformerBackbone(
            vocabulary_size=arguments.symbols**2 + 2,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            hidden_dim=arguments.dim,
            intermediate_dim=2 * arguments.dim,
            attention="xl",
            residual={"kind": residual, "final_norm": scaled or None},
            embedding={"output": "untied", "scale": scaled},
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


def accuracy(kind, learning_rate, seed, arguments):
    """Trains a model, and its percentage of right symbols on new rows."""
    model = make_model(kind, learning_rate, seed, arguments)
    options = dict(verbose=0)
    data = streams(arguments, seed)
    model.fit(data, steps_per_epoch=arguments.steps, shuffle=False, **options)
    test = streams(arguments, 2**32 + seed)
    tested = model.evaluate(test, steps=8, return_dict=True, **options)
    return 100 * tested["accuracy"]


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    rows = []
    for kind in arguments.models:
        cells, runs = [], []
        for rate in arguments.learning_rates:
            measured = [
                accuracy(kind, rate, seed, arguments) for seed in arguments.seeds
            ]
            print(kind, rate, *(f"{x:.1f}" for x in measured), flush=True)
            cells.append(mean_and_spread(measured, 1))
            runs += measured
        solved = sum(x >= 90 for x in runs)
        rows.append([kind, *cells, f"{solved} of {len(runs)}"])
    rates = [f"{rate:g}" for rate in arguments.learning_rates]
    show(["model", *rates, "90 % and more"], rows, arguments)
    print(f"A guess is right in {100 / arguments.symbols:.1f} % of the cases.")


if __name__ == "__main__":
    sys.exit(main())
