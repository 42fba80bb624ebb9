"""A picture of the attention of two models."""


def write_maps(results, path):
    """A row of heads for each layer of each model, for one held-out image.

    Args:
        results: List of dicts of `train_and_measure`.
        path: Path of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        (f"{result['attention']}\nlayer {layer}", maps)
        for result in results
        for layer, maps in enumerate(result["maps"], 1)
    ]
    columns = max(len(maps) for _, maps in rows)
    figure, axes = pyplot.subplots(
        len(rows), columns, figsize=(2 * columns, 2.2 * len(rows)), squeeze=False
    )
    for (title, maps), line in zip(rows, axes, strict=True):
        for head, axis in enumerate(line):
            axis.set_axis_off()
            axis.imshow(maps[head], vmin=0, cmap="viridis")
            axis.set_title(f"{title}, head {head + 1}", fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
