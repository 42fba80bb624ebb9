"""GTrXL against an LSTM and an ungated Transformer-XL, in a maze that needs memory.

    python examples/rl_memory.py
    python examples/rl_memory.py --agents gtrxl lstm --corridor 20 --seeds 5

The T-maze of Bakker, 2001: the first observation says whether the goal is on the left
or the right of the junction at the corridor's other end; all of the corridor looks the
same. Agents learn by advantage actor-critic from whole episodes, and act from the state
of their layers, an observation at a time. The run leaves `curves.csv` and `curves.png`
in `--out`, and prints a table of how often the goal is found in the end.
"""

import sys
from pathlib import Path

from byte_lm.errors import UsageError
from command_line import (
    BACKENDS,
    Parser,
    make_folder,
    natural,
    one_line_errors,
    positive,
    positive_float,
    select_backend,
)

AGENTS = ("gtrxl", "xl", "lstm")


def parse_arguments(argv):
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "--agents",
        nargs="+",
        choices=AGENTS,
        default=AGENTS,
        help="xl: Transformer-XL as published, with sums and the norm after them",
    )
    add("--corridor", type=positive, default=10, help="cells up to the junction")
    add("--seeds", type=positive, default=3, help="runs of each agent")
    add("--updates", type=positive, default=250)
    add("--episodes", type=positive, default=32, help="episodes in an update")
    add("--dim", type=positive, default=32)
    add("--layers", type=positive, default=2)
    add("--heads", type=positive, default=2)
    add("--learning-rate", type=positive_float, default=1e-3)
    add("--discount", type=positive_float, default=0.98)
    add("--entropy", type=positive_float, default=0.02, help="weight of the bonus")
    add("--seed", type=natural, default=0)
    add("--verbose", type=int, default=1, help="0: no progress")
    add("--out", type=Path, default=Path("runs/rl_memory"), help="folder for results")
    add("--backend", choices=BACKENDS, help="default: as Keras is configured")
    arguments = parser.parse_args(argv)
    if arguments.dim % arguments.heads:
        raise UsageError(
            f"--dim must be a multiple of --heads; received --dim {arguments.dim} "
            f"--heads {arguments.heads}"
        )
    return arguments


@one_line_errors
def main(argv=None):
    """Runs the script; returns its exit status."""
    arguments = parse_arguments(argv)
    select_backend(arguments.backend)
    make_folder(arguments.out)
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise UsageError("gymnasium is not installed: pip install gymnasium") from error
    # These import Keras, which reads the backend once.
    from maze.curves import plot, table, write
    from maze.training import learn

    curves = {}
    for agent in arguments.agents:
        curves[agent] = []
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            curves[agent].append(learn(agent, seed, arguments))
    write(arguments.out / "curves.csv", curves)
    plot(arguments.out / "curves.png", curves, arguments.corridor, arguments.episodes)
    print("\n" + table(curves))
    print(f"Wrote curves.csv and curves.png in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
