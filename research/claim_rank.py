"""Measures the rank of attention matrices, in masked models of bytes.

    python research/claim_rank.py --backend jax

Linear attention is a product of features of queries and of keys: the rank of its
matrix is at most the number of features, and that of attention to codes at most their
number. Bidirectional models are trained on rows `w w` of random words w, to name masked
symbols, which the other copy still has: each position has to see another one, and the
matrix that does so has full rank. The table has the mean rank of the models' matrices
on new rows (singular values above 1e-5 and above 1e-2 of the largest; of the layer
where it is highest), the percentage of masked symbols that are named right, and their
bits: mean and standard deviation over the seeds.
"""

import math
import sys

import folders  # noqa: F401
from claims.arguments import SEEDS, parse
from command_line import Parser, UsageError, command, positive
from tables import mean_and_spread, show

ATTENTION = [
    "softmax",
    "linear:feature_map=elu",
    "performer:num_features=8",
    "performer:num_features=128",
    "fourier",
    # Keys in the window are their codes, too, and have gradients.
    "vq:num_codes=16,window=8,quantize_window=True",
]
TOLERANCES = (1e-5, 1e-2)
# The symbol that masks others.
MASK = 0
# The part of the symbols that are masked.
MASKED = 0.15


def parse_arguments(argv):
    parser = Parser(__doc__)
    parser.add_attention(ATTENTION)
    add = parser.add_argument
    add("--length", type=positive, default=32, help="of a row, even")
    add("--symbols", type=positive, default=15)
    add("--test-rows", type=positive, default=256)
    parser.add_model_size(dim=64, heads=4, layers=1)
    parser.add_training(steps=300, batch=16, learning_rate=3e-3, rows="rows")
    parser.add_seeds(SEEDS)
    parser.add_save()
    arguments = parse(parser, argv)
    if arguments.length % 2:
        raise UsageError(f"--length must be even; received {arguments.length}")
    return arguments


def masked_copies(arguments, batch, seed):
    """Endless batches: rows with masks and their places, and what was there."""
    import numpy as np

    half = arguments.length // 2
    count = max(1, round(MASKED * arguments.length))
    random = np.random.default_rng(seed)
    while True:
        words = random.integers(1, arguments.symbols + 1, (batch, half), "int32")
        rows = np.concatenate([words, words], axis=1)
        # No place is masked in both copies.
        places = np.argsort(random.random(words.shape), axis=1)[:, :count]
        places = places + half * random.integers(0, 2, places.shape)
        places = np.sort(places, axis=1).astype("int32")
        targets = np.take_along_axis(rows, places, axis=1)
        np.put_along_axis(rows, places, MASK, axis=1)
        inputs = {
            "token_ids": rows,
            "padding_mask": np.ones(rows.shape, "int32"),
            "mask_positions": places,
        }
        yield inputs, targets


def make_model(attention, seed, arguments):
    """A masked language model, compiled."""
    import keras

    from claims.byte_models import compile_model
    from keras_efficient_attn.models import (
        EfficientMaskedLM,
        EfficientTransformerBackbone,
    )

    keras.utils.set_random_seed(seed)
    model = EfficientMaskedLM(
        EfficientTransformerBackbone(
            vocabulary_size=arguments.symbols + 1,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            hidden_dim=arguments.dim,
            intermediate_dim=4 * arguments.dim,
            attention=attention,
            architecture="encoder",
            positions={"kind": "learned", "max_length": arguments.length},
        )
    )
    compile_model(model, arguments, metrics=["accuracy"])
    return model


def ranks(model, tokens):
    """The mean rank of the matrices of the layer where it is highest, by tolerance."""
    import numpy as np
    from keras import ops

    x, found = model.backbone.embedding(tokens), []
    for block in model.backbone.encoder.blocks:
        h = block.attention_residual.before(x)
        _, scores = block.attention(h, h, return_attention_scores=True)
        scores = ops.convert_to_numpy(scores).astype("float64")
        values = np.linalg.svd(scores, compute_uv=False)
        largest = values[..., :1]
        found.append([(values > t * largest).sum(-1).mean() for t in TOLERANCES])
        x = block(x)
    return [float(x) for x in np.max(found, axis=0)]


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    rows = []
    for attention in arguments.attention:
        results = []
        for seed in arguments.seeds:
            model = make_model(attention, seed, arguments)
            model.fit(
                masked_copies(arguments, arguments.batch, seed),
                shuffle=False,
                steps_per_epoch=arguments.steps,
                verbose=0,
            )
            # No seed of training data.
            test = masked_copies(arguments, arguments.test_rows, 2**32 + seed)
            inputs, targets = next(test)
            tested = model.evaluate(inputs, targets, verbose=0, return_dict=True)
            found = ranks(model, inputs["token_ids"][:8])
            bits = tested["loss"] / math.log(2)
            results.append([*found, 100 * tested["accuracy"], bits])
            print(attention, seed, *(f"{x:.3f}" for x in results[-1]), flush=True)
        columns = zip(zip(*results, strict=True), (1, 1, 1, 3), strict=True)
        rows.append([attention, *(mean_and_spread(*column) for column in columns)])
    header = [f"rank, {tolerance:g}" for tolerance in TOLERANCES]
    header += ["accuracy, %", "bits per masked symbol"]
    show(["attention", *header], rows, arguments)
    print(f"A guess is right in {100 / arguments.symbols:.1f} % of the cases.")


if __name__ == "__main__":
    sys.exit(main())
