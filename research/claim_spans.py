"""Trains byte models whose heads learn a span, static or dynamic.

    python research/claim_spans.py --backend jax

A static span belongs to a head; a dynamic one depends on the position too, so that a
head may look far back at a few positions only. Models of `AdaptiveSpan` are trained
with each of the penalties, and one of the whole span without a mask that is learned.
The table has bits per byte of held-out text, and the mean span of all heads in
positions, also by layer: mean and standard deviation over the seeds.
"""

import sys

import folders  # noqa: F401
from claims.arguments import add_bytes, parse
from command_line import Parser, command, not_negative, positive
from tables import mean_and_spread, show

FULL = "none"


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--penalties", nargs="+", type=not_negative, default=[2e-3])
    add("--max-span", type=positive, default=256)
    add("--ramp", type=positive, default=16, help="positions")
    add_bytes(parser, length=256)
    parser.add_model_size(dim=48, heads=4, layers=1)
    parser.add_training(steps=250, batch=4, learning_rate=1e-2, rows="rows")
    parser.add_save()
    return parse(parser, argv)


def attention(kind, penalty, arguments):
    """The layer's name and options."""
    shared = f"max_span={arguments.max_span},ramp={arguments.ramp}"
    shared = f"adaptive-span:{shared},relative_positions=True"
    half = arguments.max_span / 2
    if kind == FULL:
        # The mask is 1 everywhere, where it has no gradient.
        return f"{shared},initial_span={arguments.max_span},penalty=0.0"
    dynamic = kind == "dynamic"
    return f"{shared},initial_span={half},penalty={penalty},dynamic={dynamic}"


@command(parse_arguments)
def main(arguments):
    """Trains and tests the models, and prints the table."""
    # It imports Keras, which reads the backend once.
    import numpy as np

    from claims.byte_models import bits_per_byte, load_text, make_model, train

    splits = load_text(arguments, arguments.length)
    kinds = [(FULL, 0)]
    kinds += [(k, p) for p in arguments.penalties for k in ("static", "dynamic")]
    rows = []
    for kind, penalty in kinds:
        bits, spans, by_layer = [], [], []
        for seed in arguments.seeds:
            model = make_model(attention(kind, penalty, arguments), seed, arguments)
            train(model, splits["train"], seed, arguments)
            blocks = model.backbone.decoder.blocks
            by_layer.append([float(np.mean(b.attention.spans())) for b in blocks])
            spans.append(float(np.mean(by_layer[-1])))
            sizes = arguments.length, arguments.length
            bits.append(bits_per_byte(model, splits["test"], *sizes, arguments.windows))
            print(kind, penalty, seed, f"{bits[-1]:.3f} {spans[-1]:.1f}", flush=True)
        cells = mean_and_spread(bits, 3), mean_and_spread(spans, 1)
        layers = (mean_and_spread(x, 0) for x in zip(*by_layer, strict=True))
        rows.append([kind, f"{penalty:g}", *cells, ", ".join(layers)])
    header = ["learned span", "penalty", "bits per byte", "mean span", "by layer"]
    show(header, rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
