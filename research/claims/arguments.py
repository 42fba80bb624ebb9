"""Arguments that the scripts share."""

from pathlib import Path

from command_line import check_heads, positive

# A claim is measured with three.
SEEDS = (0, 1, 2)


def add_bytes(parser, length):
    """Adds `--text`, `--length`, `--windows` and `--seeds`."""
    add = parser.add_argument
    add("--text", type=Path, help="default: the standard library's source")
    add("--length", type=positive, default=length, help="bytes per row of a batch")
    add("--windows", type=positive, default=128, help="held out, to measure on")
    parser.add_seeds(SEEDS)


def parse(parser, argv):
    """The parsed arguments, whose `--heads` divide their `--dim`."""
    arguments = parser.parse_args(argv)
    check_heads(arguments.dim, arguments.heads)
    return arguments
