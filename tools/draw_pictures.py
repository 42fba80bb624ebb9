"""Draws the pictures of the documentation that explain and do not measure.

    KERAS_BACKEND=jax python -m tools.draw_pictures

Writes `docs/patterns.png`, from the scores of the layers themselves, `docs/states.png`
and `docs/decision.png`.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLUE, GREY, LIGHT = "#0072B2", "#888888", "#DCE9F2"
LENGTH = 32
# Titles of the layers whose patterns are drawn, causal.
PATTERNS = {
    "softmax": "softmax: all keys",
    "local:window=8": "local: a window of 8",
    "local:query_block=8,memory=4": "local: blocks of 8, 4 before",
    "sparse:stride=8": "sparse, strided: 8",
    "sparse:pattern=fixed,stride=8,summary=2": "sparse, fixed: 8",
    "reformer:bucket_size=4,num_hashes=2": "reformer: hash buckets",
    "adaptive-span:max_span=16,initial_span=8,ramp=8": "adaptive-span: a ramp",
    "retention:decays=[0.8],rotary_wavelength=None": "retention: a decay",
}
# Questions with their answers: another question, or what to use.
DECISION = [
    ("Is there a trained softmax model?", "convert_backbone:\nvq or performer, window"),
    ("Is it an image, or rows\nof one length?", "local: one size or two;\nsparse"),
    ("Does it read both ways?", "local, rotary positions\n(the default of encoders)"),
    (
        "Must it find a few\ndistant keys exactly?",
        "delta",
    ),
    ("Is recall needed at all?", "gated-delta\n(the default of decoders)"),
]
OTHERWISE = "retention with\na convolution: cheaper"


def figure(width, height):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def draw_patterns(path):
    import keras

    from keras_efficient_attn.layers import get_attention

    keras.utils.set_random_seed(0)
    picture = figure(9, 5)
    for place, (name, title) in enumerate(PATTERNS.items(), 1):
        # Equal inputs have equal logits: what is left is the pattern. Hashing needs
        # inputs that differ.
        equal = not name.startswith("reformer")
        x = keras.random.normal((1, 1 if equal else LENGTH, 16))
        x = keras.ops.broadcast_to(x, (1, LENGTH, 16))
        layer = get_attention(name, num_heads=1, key_dim=16)
        _, scores = layer(x, x, use_causal_mask=True, return_attention_scores=True)
        scores = abs(keras.ops.convert_to_numpy(scores)[0, 0])
        axes = picture.add_subplot(2, 4, place)
        # Each query's weights, as shares of its largest.
        axes.imshow(scores / scores.max(-1, keepdims=True), cmap="Blues", vmin=0)
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("keys", fontsize=8)
        axes.set_ylabel("queries", fontsize=8)
    picture.savefig(path, dpi=120)


def draw_states(path):
    picture = figure(9, 3)
    titles = (
        "softmax: keys and values of all\npositions; a token reads all of them",
        "local: those of the last positions;\nolder ones are dropped",
        "linear, decays, delta rules: one\nmatrix, updated in place",
    )
    for place, title in enumerate(titles, 1):
        axes = picture.add_subplot(1, 3, place)
        axes.set_xlim(0, 12)
        axes.set_ylim(0, 4)
        axes.axis("off")
        axes.set_title(title, fontsize=9)
        if place < 3:
            for column in range(12):
                kept = place == 1 or column >= 8
                for row in (0.6, 2.2):
                    box(axes, (column, row), (0.8, 1.2), BLUE if kept else LIGHT)
            axes.text(0, 3.6, "values and keys by position →", fontsize=8, color=GREY)
        else:
            for column in range(5):
                for row in range(4):
                    box(axes, (5 + 0.8 * column, 0.2 + 0.8 * row), (0.7, 0.7), BLUE)
            axes.text(5, 3.6, "values", fontsize=8, color=GREY)
            axes.text(0, 1.7, "features of keys", fontsize=8, color=GREY)
    picture.savefig(path, dpi=120)


def draw_decision(path):
    picture = figure(8, 6)
    axes = picture.add_subplot()
    axes.set_xlim(0.5, 9.7)
    axes.set_ylim(-0.5, len(DECISION) + 0.5)
    axes.axis("off")
    for step, (question, answer) in enumerate(DECISION):
        y = len(DECISION) - step
        label(axes, (2.6, y), question, LIGHT)
        label(axes, (7.6, y), answer, "white")
        arrow(axes, (4.8, y), (5.9, y), "yes")
        arrow(axes, (2.6, y - 0.3), (2.6, y - 0.7), "no")
    label(axes, (2.6, 0), OTHERWISE, "white")
    picture.savefig(path, dpi=120)


def box(axes, place, size, colour):
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(place, *size, color=colour))


def label(axes, place, text, colour):
    axes.text(
        *place,
        text,
        ha="center",
        va="center",
        fontsize=10,
        bbox={"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": BLUE},
    )


def arrow(axes, start, end, text):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY})
    middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
    axes.text(middle[0] + 0.1, middle[1] + 0.1, text, fontsize=9, color=GREY)


def main():
    draw_patterns(DOCS / "patterns.png")
    draw_states(DOCS / "states.png")
    draw_decision(DOCS / "decision.png")


if __name__ == "__main__":
    sys.exit(main())
