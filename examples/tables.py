"""Tables of results, as Markdown and as JSON."""

import json
import statistics


def show(header, rows, arguments):
    """Prints a table, and writes it to the file of `--save`.

    Args:
        header: The titles of the columns.
        rows: Lists of cells, numbers or texts.
        arguments: The parsed arguments, with `save` and `command`.
    """
    print("\n" + markdown(header, rows), flush=True)
    if arguments.save is None:
        return
    # It imports Keras, which reads the backend once.
    from keras_efficient_attn.benchmark.worker import describe_environment

    words = [str(word) for word in arguments.command]
    words = [
        word
        for last, word in zip(["", *words[:-1]], words, strict=True)
        if "--save" not in (last, word) and not word.startswith("--save=")
    ]
    record = {
        "command": ["python", *words],
        "environment": describe_environment(),
        "header": [str(title) for title in header],
        "rows": [[str(cell) for cell in row] for row in rows],
    }
    arguments.save.write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def mean_and_spread(values, digits):
    """`"mean ± standard deviation"` of one number or more; without the latter, of one.

    The deviation is that of a sample, divided by n − 1.
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def markdown(header, rows):
    """The table of these cells, without a newline at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
