"""The plot of `swap_attention.py`."""


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
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
