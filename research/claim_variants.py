"""Trains byte models that differ in one thing, for two claims.

    python research/claim_variants.py auxiliary --backend jax
    python research/claim_variants.py sparse --backend jax

`auxiliary`: a stack of many thin layers, with the auxiliary losses of Al-Rfou et al.
(a loss of each layer, two targets at a position) and without.
`sparse`: the three ways to use the two factors of a sparse pattern: layers that take
turns (interleaved), a head that sees both (merged), and heads of either (split); and
attention to all earlier positions. The table has bits per byte of held-out text: mean
and standard deviation over the seeds.
"""

import sys

import folders  # noqa: F401
from claims.arguments import add_bytes, parse
from command_line import Parser, command, positive
from tables import markdown, mean_and_spread

ROTARY = "rotary_wavelength=10000"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("claim", choices=("auxiliary", "sparse"))
    add("--patterns", nargs="+", choices=("fixed", "strided"), default=["fixed"])
    add("--stride", type=positive, default=16, help="of the sparse patterns")
    add(
        "--residuals",
        nargs="+",
        choices=("post_norm", "pre_norm"),
        default=["post_norm"],
        help="of the deep stacks",
    )
    add_bytes(parser, length=256)
    parser.add_model_size(dim=48, heads=2, layers=8)
    parser.add_training(steps=250, batch=4, learning_rate=5e-3, rows="rows")
    return parse(parser, argv)


def variants(arguments):
    """The models to train.

    Returns:
        Dict from a name to the attention, further options of the backbone, and whether
        there are auxiliary losses.
    """
    if arguments.claim == "auxiliary":
        positions = {"kind": "learned", "max_length": arguments.length}
        options = dict(
            positions={**positions, "each_layer": True},
            feed_forward="relu",
            embedding="untied",
        )
        return {
            f"{residual}, {label}": ("softmax", {**options, "residual": residual}, on)
            for residual in arguments.residuals
            for label, on in (("last loss only", False), ("auxiliary losses", True))
        }
    ways = {"full (softmax)": f"softmax:{ROTARY}"}
    for pattern in arguments.patterns:
        sparse = f"sparse:pattern={pattern},stride={arguments.stride},{ROTARY},factors="
        ways[f"{pattern}, interleaved"] = [f"{sparse}0", f"{sparse}1"]
        ways[f"{pattern}, merged"] = f"{sparse}merged"
        ways[f"{pattern}, split"] = f"{sparse}split"
    return {name: (attention, {}, False) for name, attention in ways.items()}


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # It imports Keras, which reads the backend once.
    from claims.byte_models import bits_per_byte, load_text, make_model, train
    from keras_efficient_attn.models import AuxiliaryLosses

    splits = load_text(arguments, arguments.length)
    rows = []
    for name, (attention, options, auxiliary) in variants(arguments).items():
        bits = []
        for seed in arguments.seeds:
            model = make_model(attention, seed, arguments, **options)
            trained = AuxiliaryLosses(model, arguments.steps) if auxiliary else model
            train(trained, splits["train"], seed, arguments)
            sizes = arguments.length, arguments.length
            bits.append(bits_per_byte(model, splits["test"], *sizes, arguments))
            print(f"{name} {seed}: {bits[-1]:.3f}", flush=True)
        rows.append([name, mean_and_spread(bits, 3)])
    print("\n" + markdown(["model", "bits per byte"], rows))


if __name__ == "__main__":
    sys.exit(main())
