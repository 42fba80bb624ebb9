"""Measures the rank of attention matrices, in masked models of bytes.

    python examples/claim_rank.py --backend jax

Linear attention is a product of features of queries and of keys: the rank of its
matrix is at most the number of features, and that of attention to codes at most their
number. Bidirectional models are trained to name masked bytes. The table has the mean
rank of their matrices on held-out text (singular values above 1e-5 and above 1e-2 of
the largest), the percentage of masked bytes that are named right, and their bits: mean
and standard deviation over the seeds.
"""

import math
import sys

from claims.arguments import add_bytes, parse
from claims.tables import markdown, mean_and_spread
from command_line import Parser, command

ATTENTION = [
    "softmax",
    "linear:feature_map=elu",
    "performer:num_features=16",
    "performer:num_features=128",
    "fourier",
    # Keys in the window are their codes, too, and have gradients.
    "vq:num_codes=32,window=16,quantize_window=True",
]
TOLERANCES = (1e-5, 1e-2)
MASK = 256
# The part of the bytes that are masked.
MASKED = 0.15


def parse_arguments(argv):
    parser = Parser(__doc__)
    parser.add_attention(ATTENTION)
    add_bytes(parser, length=128)
    parser.add_model_size(dim=64, heads=2, layers=2)
    parser.add_training(steps=300, batch=8, learning_rate=3e-3, rows="rows")
    return parse(parser, argv)


def masked_batches(data, length, batch, seed):
    """Endless batches: rows with masked bytes and their places, and the bytes."""
    import numpy as np

    count = max(1, round(MASKED * length))
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(data) - length, batch)
        rows = data[starts[:, None] + np.arange(length)].astype("int32")
        places = np.argsort(random.random(rows.shape), axis=1)[:, :count]
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
    """A masked language model of bytes, compiled."""
    import keras

    from claims.byte_models import compile_model
    from keras_efficient_attn.models import (
        EfficientMaskedLM,
        EfficientTransformerBackbone,
    )

    keras.utils.set_random_seed(seed)
    model = EfficientMaskedLM(
        EfficientTransformerBackbone(
            vocabulary_size=257,
            num_layers=arguments.layers,
            num_heads=arguments.heads,
            hidden_dim=arguments.dim,
            intermediate_dim=4 * arguments.dim,
            attention=attention,
            architecture="encoder",
            positions="sinusoidal",
        )
    )
    compile_model(model, arguments, metrics=["accuracy"])
    return model


def ranks(model, tokens):
    """The mean rank of all layers' and heads' matrices, for each of `TOLERANCES`."""
    import numpy as np
    from keras import ops

    x, found = model.backbone.embedding(tokens), []
    for block in model.backbone.encoder.blocks:
        h = block.attention_residual.before(x)
        _, scores = block.attention(h, h, return_attention_scores=True)
        scores = ops.convert_to_numpy(scores).astype("float64")
        values = np.linalg.svd(scores, compute_uv=False)
        found.append([values > t * values[..., :1] for t in TOLERANCES])
        x = block(x)
    return [
        float(np.mean([layer[i].sum(-1).mean() for layer in found]))
        for i in range(len(TOLERANCES))
    ]


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # It imports Keras, which reads the backend once.
    from claims.byte_models import load_text

    splits = load_text(arguments, arguments.length)
    rows = []
    for attention in arguments.attention:
        results = []
        for seed in arguments.seeds:
            model = make_model(attention, seed, arguments)
            sizes = arguments.length, arguments.batch
            model.fit(
                masked_batches(splits["train"], *sizes, seed),
                shuffle=False,
                steps_per_epoch=arguments.steps,
                verbose=0,
            )
            test = masked_batches(splits["test"], arguments.length, 16, 2**32)
            count = -(-arguments.windows // 16)
            tested = model.evaluate(test, steps=count, verbose=0, return_dict=True)
            inputs, _ = next(masked_batches(splits["test"], sizes[0], 8, 2**32))
            found = ranks(model, inputs["token_ids"])
            bits = tested["loss"] / math.log(2)
            results.append([*found, 100 * tested["accuracy"], bits])
            print(attention, seed, *(f"{x:.3f}" for x in results[-1]), flush=True)
        columns = zip(zip(*results, strict=True), (1, 1, 1, 3), strict=True)
        rows.append([attention, *(mean_and_spread(*column) for column in columns)])
    header = [f"rank, {tolerance:g}" for tolerance in TOLERANCES]
    header += ["right, %", "bits per masked byte"]
    print("\n" + markdown(["attention", *header], rows))


if __name__ == "__main__":
    sys.exit(main())
