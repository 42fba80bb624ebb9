"""Compares two ways to choose layers, and their windows, for efficient attention.

    python research/compare_choices.py --teacher runs/teacher
    python research/compare_choices.py --preset ./a_hugging_face_folder --length 128

Layers are replaced in the order of the harm that each does alone: to what leaves the
last block, or to the model's output (the divergence of its logits where it is causal,
else the error of the mean hidden states). Windows are chosen for the least sum of the
errors of the layers' own outputs, or of the effects on the model's output. Both ways
choose on validation text; the tables have the effect on the output for test text, at
equal budgets.
"""

import sys
from pathlib import Path

import folders  # noqa: F401
from byte_lm.data import load_splits
from command_line import Parser, UsageError, at_least_one, command, positive

ATTENTION = "performer:feature_map=power,rank=21,window=8,calibrated=True"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--preset", help="name of a preset, or folder of KerasHub or Hugging Face")
    add(
        "--teacher",
        type=Path,
        metavar="FOLDER",
        help="instead: of `distill_byte_lm.py`",
    )
    parser.add_attention(ATTENTION)
    add("--text", metavar="FILE_OR_FOLDER", help="default: the standard library")
    add("--length", type=positive, default=128, help="tokens of a text")
    add("--batch", type=positive, default=8, help="texts to choose on, and to test on")
    add("--window-budgets", type=at_least_one, nargs="*", default=[4, 8, 16])
    parser.add_seed_and_verbose()
    arguments = parser.parse_args(argv)
    if (arguments.preset is None) == (arguments.teacher is None):
        raise UsageError("either --preset or --teacher is needed")
    return arguments


@command(parse_arguments)
def main(arguments):
    """Prints both tables."""
    splits = load_splits(arguments.text)
    # This imports Keras, which reads the backend once.
    from choices import run

    run(arguments, splits)


if __name__ == "__main__":
    sys.exit(main())
