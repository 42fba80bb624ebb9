"""The plots of `swap_attention.py`."""

from keras_efficient_attn.benchmark.report import COLORS, MARKERS, SOFTMAX_COLOR
from keras_efficient_attn.layers.attention.registry import parse_attention


def plot(path, found):
    """The error of each swap, as it is and with one path of its layers, as bars.

    Args:
        path: The file.
        found: Dict by attention, from `by_path`: of dicts of `(mean, least)` cosine.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(kind for paths in found.values() for kind in paths))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.6 * len(found)))
    height = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        rows = [row for row, paths in enumerate(found.values()) if kind in paths]
        errors = [1 - paths[kind][0] for paths in found.values() if kind in paths]
        places = [row + (number - (len(kinds) - 1) / 2) * height for row in rows]
        # Below a rounding error of float32 there is nothing to see.
        bars = axes.barh(places, [max(e, 1e-6) for e in errors], height, label=kind)
        axes.bar_label(bars, [f" {1 - e:.4f}" for e in errors], fontsize="x-small")
    axes.set_yticks(range(len(found)), list(found), fontsize="small")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("1 - mean cosine to the original's embedding (label: the cosine)")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def plot_accuracy(path, points, length):
    """The error of each swap against the time of the whole model, as points.

    Swaps of one kind, which differ in their sizes, are on one line.

    Args:
        path: The file.
        points: Dict by attention of `(time, cosine)`; softmax takes the time 1.
        length: Tokens at which the time was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    kinds = {}
    for name, (time, cosine) in points.items():
        kind, size = _kind_and_size(name)
        # Below a rounding error of float32 there is nothing to see.
        kinds.setdefault(kind, []).append((time, max(1 - cosine, 1e-6), size))
    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(1.0, color=SOFTMAX_COLOR, linestyle="--", label="softmax: no error")
    for number, (kind, found) in enumerate(kinds.items()):
        times, errors, sizes = zip(*sorted(found), strict=True)
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        axes.loglog(times, errors, color=color, marker=marker, label=kind)
        for index, place in enumerate(zip(times, errors, strict=True)):
            # In turns above on the right and below on the left: neighbours are near.
            above = (number + index) % 2 == 0
            axes.annotate(
                sizes[index],
                place,
                xytext=(5, 4) if above else (-5, -10),
                textcoords="offset points",
                ha="left" if above else "right",
                color=color,
                fontsize=7,
            )
    axes.margins(x=0.25)
    axes.set_xlabel(f"time of the model at {length:,} tokens, as a share of softmax's")
    axes.set_ylabel("1 - mean cosine to the original's embedding")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.set_major_formatter(lambda value, position: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _kind_and_size(name):
    """A swap's kind and sizes: of `"vq:window=32,num_codes=64"`, `("vq, window 32",
    "64 codes")`."""
    _, options = parse_attention(name)
    kind, sizes = [name.split(":")[0]], []
    for option, value in options.items():
        words = f"{option.removeprefix('num_').replace('_', ' ')} {value}"
        is_size = option in ("num_codes", "num_features", "rank")
        if is_size or (option == "window" and kind == ["local"]):
            sizes.append(words)
        else:
            kind.append(option if value is True else words)
    return ", ".join(kind), ", ".join(sizes)
