"""Trains byte models that differ in one thing, for four claims.

    python research/claim_variants.py auxiliary --backend jax
    python research/claim_variants.py sparse --backend jax

`auxiliary`: a stack of many thin layers, with the auxiliary losses of Al-Rfou et al.
(a loss of each layer, two targets at a position), with each alone, and without.
`sparse`: the three ways to use the two factors of a sparse pattern: layers that take
turns (interleaved), a head that sees both (merged), and heads of either (split); and
attention to all earlier positions.
`maps`: linear attention with elu + 1, with keys of twice the width, and with the
exponential function.
`blocks`: Reformer's two changes that save memory, each alone: one projection for
queries and keys, and reversible blocks.
The table has bits per byte of held-out text: mean and standard deviation over the
seeds.
"""

import sys

import folders  # noqa: F401
from claims.arguments import add_bytes, parse
from command_line import Parser, command, positive
from tables import mean_and_spread, show

ROTARY = "rotary_wavelength=10000"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("claim", choices=tuple(CLAIMS))
    add("--patterns", nargs="+", choices=("fixed", "strided"), default=["fixed"])
    add("--stride", type=positive, default=16, help="of the sparse patterns")
    add(
        "--residuals",
        nargs="+",
        choices=("post_norm", "pre_norm"),
        default=["post_norm", "pre_norm"],
        help="of the deep stacks",
    )
    add("--positions", choices=("sinusoidal",), help="of the blocks; default: none")
    add_bytes(parser, length=256)
    parser.add_model_size(dim=48, heads=2, layers=8)
    parser.add_training(steps=250, batch=4, learning_rate=5e-3, rows="rows")
    parser.add_save()
    return parse(parser, argv)


def auxiliary(arguments):
    positions = {"kind": "learned", "max_length": arguments.length}
    options = dict(
        positions={**positions, "each_layer": True},
        feed_forward="relu",
        embedding="untied",
    )
    losses = {
        "last loss only": None,
        # The losses of the layers end with the schedule, here at once.
        "two targets": {"total_steps": 1},
        "losses of all layers": {"total_steps": arguments.steps, "num_targets": 1},
        "both": {"total_steps": arguments.steps},
    }
    return {
        f"{residual}, {label}": ("softmax", {**options, "residual": residual}, kept)
        for residual in arguments.residuals
        for label, kept in losses.items()
    }


def sparse(arguments):
    ways = {"full (softmax)": f"softmax:{ROTARY}"}
    for pattern in arguments.patterns:
        sparse = f"sparse:pattern={pattern},stride={arguments.stride},{ROTARY},factors="
        ways[f"{pattern}, interleaved"] = [f"{sparse}0", f"{sparse}1"]
        ways[f"{pattern}, merged"] = f"{sparse}merged"
        ways[f"{pattern}, split"] = f"{sparse}split"
    return {name: (attention, {}, None) for name, attention in ways.items()}


def maps(arguments):
    width = arguments.dim // arguments.heads
    ways = {
        "elu + 1": "linear:feature_map=elu",
        "elu + 1, keys of twice the width": (
            f"linear:feature_map=elu,key_dim={2 * width},value_dim={width}"
        ),
        "exp": "linear:feature_map=exp",
    }
    options = dict(convolution=4)
    return {name: (attention, options, None) for name, attention in ways.items()}


def blocks(arguments):
    options = dict(convolution=4, positions=arguments.positions)
    shared = f"reformer:num_hashes=1,dense_length={arguments.length}"
    return {
        "softmax": ("softmax", options, None),
        "one projection for queries and keys": (shared, options, None),
        "reversible": ("softmax", {**options, "residual": "reversible"}, None),
    }


# The models of each claim: dicts from a name to the attention, further options of the
# backbone, and arguments of `AuxiliaryLosses`, or `None` without them.
CLAIMS = {"auxiliary": auxiliary, "sparse": sparse, "maps": maps, "blocks": blocks}


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # It imports Keras, which reads the backend once.
    from claims.byte_models import bits_per_byte, load_text, make_model, train
    from keras_efficient_attn.models import AuxiliaryLosses

    splits = load_text(arguments, arguments.length)
    rows = []
    models = CLAIMS[arguments.claim](arguments)
    for name, (attention, options, losses) in models.items():
        bits = []
        for seed in arguments.seeds:
            model = make_model(attention, seed, arguments, **options)
            trained = model if losses is None else AuxiliaryLosses(model, **losses)
            train(trained, splits["train"], seed, arguments)
            sizes = arguments.length, arguments.length
            bits.append(bits_per_byte(model, splits["test"], *sizes, arguments.windows))
            print(f"{name} {seed}: {bits[-1]:.3f}", flush=True)
        rows.append([name, mean_and_spread(bits, 3)])
    show(["model", "bits per byte"], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
