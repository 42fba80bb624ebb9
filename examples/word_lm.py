"""Trains language models of words, and compares perplexity and heads.

    python examples/word_lm.py --attention fourier softmax
    python examples/word_lm.py --least 1 --text wiki.train.tokens wiki.valid.tokens \
        wiki.test.tokens

The format is that of WikiText-103: words between spaces, lines that end in a word of
their own. The vocabulary is that of the training text. The output projection is the
embedding, and the softmax is computed in slices of positions, so that the logits of
267,735 words never stand in memory whole. Held-out text is scored by windows that
slide: each word has most of a window before it. The table has the perplexity, and the
mean and the variance of the distance between the heads of a layer: the larger the
distance, the less one head repeats another. By default it compares Fourier with the
layer's defaults, Fourier as in its paper, and softmax. Without `--text`, the words are
those of the Python standard library's source.
"""

import sys
from pathlib import Path

from command_line import (
    Parser,
    UsageError,
    command,
    positive,
    rate,
)
from tables import mean_and_spread, show

# The form of FourierFormer's paper, with its radius for text.
PAPER = "fourier:radius_per=layer,initial_radius=2.0"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_attention(["fourier", PAPER, "softmax"])
    add(
        "--text",
        nargs=3,
        type=Path,
        metavar=("TRAIN", "VALIDATION", "TEST"),
        help="files of words between spaces",
    )
    add("--least", type=positive, default=3, help="occurrences of a word to be known")
    add("--length", type=positive, default=128, help="words of a row, and of a window")
    add("--stride", type=positive, default=32, help="words from window to window")
    add("--chunk", type=positive, default=64, help="positions of a slice of softmax")
    parser.add_model_size(dim=64, heads=4, layers=2)
    add("--dropout", type=rate, default=0.1)
    parser.add_training(steps=300, batch=8, learning_rate=2e-3, rows="rows")
    add("--test-words", type=positive, default=20_000, help="of each held-out split")
    parser.add_seeds()
    parser.add_verbose()
    parser.add_save()
    return parser.parse_args(argv)


@command(parse_arguments)
def main(arguments):
    """Trains and tests a model for each attention and seed, and prints the table."""
    if arguments.stride > arguments.length:
        raise UsageError(
            "--stride must not exceed --length; received --stride "
            f"{arguments.stride} --length {arguments.length}"
        )
    # These import Keras, which reads the backend once.
    import keras
    import numpy as np

    from words import data
    from words.model import build_model, mean_head_distances, perplexity

    words = data.load_words(arguments.text)
    vocabulary = data.make_vocabulary(words["train"], arguments.least)
    tokens = {name: data.encode(split, vocabulary) for name, split in words.items()}
    for name in ("validation", "test"):
        tokens[name] = tokens[name][: arguments.test_words]
    for name, split in tokens.items():
        if len(split) <= arguments.length:
            raise UsageError(
                f"--length {arguments.length} is too long: the {name} text has "
                f"{len(split)} words"
            )
    print(
        f"{len(vocabulary):,} words; "
        + ", ".join(f"{len(split):,} {name}" for name, split in tokens.items()),
        flush=True,
    )
    rows = []
    for attention in arguments.attention:
        results = []
        for seed in arguments.seeds:
            print(f"\n== {attention}, seed {seed}", flush=True)
            keras.utils.set_random_seed(seed)
            model = build_model(attention, len(vocabulary), arguments)
            model.fit(
                data.batches(tokens["train"], arguments.length, arguments.batch, seed),
                steps_per_epoch=arguments.steps,
                verbose=arguments.verbose,
            )
            windows = arguments.length, arguments.stride, arguments.batch
            scored = [
                perplexity(model, tokens[name], *windows)
                for name in ("validation", "test")
            ]
            last = len(tokens["test"]) - arguments.length
            starts = np.linspace(0, last, arguments.batch, dtype=int)
            seen = tokens["test"][starts[:, None] + np.arange(arguments.length)]
            results.append((*scored, *mean_head_distances(model, seen)))
            print(*(f"{x:.3f}" for x in results[-1]), flush=True)
        columns = zip(zip(*results, strict=True), (1, 1, 3, 3), strict=True)
        rows.append([attention, *(mean_and_spread(*column) for column in columns)])
    header = ["attention", "validation perplexity", "test perplexity"]
    show([*header, "distance between heads", "its variance"], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
