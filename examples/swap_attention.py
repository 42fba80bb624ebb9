"""Replaces the attention of a trained model, and measures the effect.

    python examples/swap_attention.py
    python examples/swap_attention.py --preset bert_base_en --out runs/efficient_bert
    python examples/swap_attention.py --preset ./a_hugging_face_folder \\
        --attention vq:window=32,num_codes=256

Without a preset, it trains a small encoder of bytes first, for about a minute. Every
attention layer is replaced, and where it can be is fitted to texts that the original
reads; a table and a plot have the cosine between the mean hidden states of the original
and of each swap on others: as it is, with its windows only, and with its linear paths
only. With `--compare-length N`, the time of the whole model with each attention is
measured at that length, in turns with softmax, and `accuracy.png` has the error against
the time.
The first attention in the list then goes on: its errors layer by layer, the time and
memory of the whole model against the original's, some steps of distillation, after
which it is compared again, and a preset in the folder of `--out`.
"""

import sys

from byte_lm.data import load_splits
from command_line import (
    Parser,
    UsageError,
    command,
    make_folder,
    natural,
    positive,
    positive_float,
    share,
)

ATTENTION = [
    "vq:window=32,num_codes=256",
    "performer:feature_map=power,rank=21,window=32,calibrated=True",
    "performer:num_features=256,window=32,calibrated=True",
    "performer:num_features=256,window=32",
    "local:window=32",
]


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--preset", help="name of a preset, or folder of KerasHub or Hugging Face")
    parser.add_attention(
        ATTENTION, "layers of this package, with options of their constructors"
    )
    add("--layers", nargs="+", type=natural, help="which to replace; default: all")
    add(
        "--budget",
        type=positive_float,
        help="instead: replace as many as this relative error allows",
    )
    add("--text", metavar="FILE_OR_FOLDER", help="default: the standard library")
    add("--length", type=positive, default=256, help="tokens of a text")
    add("--batch", type=positive, default=16, help="texts of a batch")
    add("--calibration", type=positive, default=2, help="batches to fit to")
    add("--test", type=positive, default=2, help="batches to compare on")
    add(
        "--compare-length",
        type=positive,
        metavar="N",
        help="tokens at which to measure the time of every attention",
    )
    add("--train-steps", type=positive, default=80, help="of the small encoder")
    add(
        "--lengths",
        nargs="*",
        type=positive,
        default=[256, 1024, 4096, 32768],
        help="at which to measure time and memory",
    )
    add(
        "--time-limit",
        type=positive_float,
        default=20.0,
        help="seconds of one run of a model at a length; longer ones are left out",
    )
    add(
        "--transfer-steps",
        type=natural,
        default=0,
        help="of distillation's first stage, for learned features or soft codes",
    )
    add("--steps", type=natural, default=30, help="of its second stage")
    add("--transfer-learning-rate", type=positive_float, default=1e-2)
    add("--learning-rate", type=positive_float, default=1e-3)
    add("--lora-rank", type=natural, default=8, help="0: train all weights")
    add("--window-dropout", type=share, default=0.0, help="from 0 to 1")
    parser.add_out("runs/swap", "the new preset, and the plots with their numbers")
    parser.add_seed_and_verbose()
    parser.add_save()
    arguments = parser.parse_args(argv)
    if arguments.layers and arguments.budget:
        raise UsageError(
            "--layers and --budget cannot be used together; give one of them"
        )
    return arguments


@command(parse_arguments)
def main(arguments):
    """Installs each attention, and prints its similarity and cost."""
    make_folder(arguments.out)
    folder = arguments.out
    if any(folder.iterdir()):
        raise UsageError(f"--out {folder} is not empty; choose another folder")
    splits = load_splits(arguments.text)
    # Imported here because Keras reads the backend on import.
    from swapping.run import run

    run(arguments, splits, folder)


if __name__ == "__main__":
    sys.exit(main())
