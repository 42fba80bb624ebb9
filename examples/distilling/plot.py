"""The plot of `distill_byte_lm.py`."""


def plot(path, lengths, rows):
    """Bits per byte against the length of the context.

    Args:
        path: The file.
        lengths: Context lengths in bytes.
        rows: Dict from names to lists that start with the bits per byte at these
            lengths.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, values in rows.items():
        style = "-" if name.endswith("as it is") or name == "teacher" else "--"
        axes.plot(lengths, values[: len(lengths)], style, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length of a window, bytes")
    axes.set_ylabel("bits per byte")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
