"""GTrXL against an LSTM and an ungated Transformer-XL, in a maze that needs memory.

    python examples/rl_memory.py
    python examples/rl_memory.py --agents gtrxl lstm --corridor 20 --seeds 0 1 2 3 4

The T-maze of Bakker, 2001: the first observation shows whether the goal is on the left
or the right of the junction at the corridor's other end; the whole corridor looks the
same. Agents learn by advantage actor-critic from whole episodes, and act from their
layers' states, one observation at a time. The run writes `curves.csv` and `curves.png`
to `--out`, and prints how often the goal is found at the end of training.
"""

import sys

from command_line import (
    Parser,
    UsageError,
    check_heads,
    command,
    make_folder,
    positive,
    positive_float,
)
from tables import show

AGENTS = ("gtrxl", "xl", "lstm")


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--agents",
        nargs="+",
        choices=AGENTS,
        default=AGENTS,
        help="xl: Transformer-XL as published, with sums and the norm after them",
    )
    add("--corridor", type=positive, default=10, help="cells up to the junction")
    add("--updates", type=positive, default=250)
    add("--episodes", type=positive, default=32, help="episodes in an update")
    parser.add_model_size(dim=32, heads=2, layers=2)
    add("--learning-rate", type=positive_float, default=1e-3)
    add("--discount", type=positive_float, default=0.98)
    add("--entropy", type=positive_float, default=0.02, help="weight of the bonus")
    parser.add_seeds((0, 1, 2))
    parser.add_verbose()
    parser.add_out("runs/rl_memory", "the curves")
    parser.add_save()
    arguments = parser.parse_args(argv)
    check_heads(arguments.dim, arguments.heads)
    return arguments


@command(parse_arguments)
def main(arguments):
    """Trains the agents, writes their curves and prints the table."""
    make_folder(arguments.out)
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise UsageError("gymnasium is not installed: pip install gymnasium") from error
    # Imported here because Keras reads the backend on import.
    from maze.curves import plot, table, write
    from maze.training import learn

    curves = {}
    for agent in arguments.agents:
        curves[agent] = []
        for seed in arguments.seeds:
            curves[agent].append(learn(agent, seed, arguments))
    write(arguments.out / "curves.csv", curves)
    plot(arguments.out / "curves.png", curves, arguments.corridor, arguments.episodes)
    show(*table(curves), arguments)
    print(f"Wrote curves.csv and curves.png in {arguments.out}")


if __name__ == "__main__":
    sys.exit(main())
