"""The steps of `swap_attention.py`."""

import contextlib
import itertools
import json
import time

import keras_hub
import numpy as np

from command_line import UsageError
from keras_efficient_attn import VQAttention
from keras_efficient_attn.layers.attention.registry import parse_attention
from keras_efficient_attn.models import convert_backbone, distill, swap_report
from keras_efficient_attn.models.conversion.paths import has_two_paths
from keras_efficient_attn.models.conversion.report import PATHS, WHOLE
from swapping import original as originals
from swapping.cost import SOFTMAX, lengthen, measure, seconds_in_turns
from swapping.plot import plot, plot_accuracy
from swapping.similarity import cosines, embeddings
from tables import show

HEADER = [
    "attention",
    "cosine",
    "minimum",
    "window only",
    "linear only",
    "replaced",
    "s",
]


def run(arguments, splits, folder):
    """Converts, reports, measures, trains and saves."""
    original = _original(arguments, splits)
    backbone = original.backbone
    fitted, held_out = (
        _batches(original, splits[name], count, arguments)
        for name, count in (
            ("validation", arguments.calibration),
            ("test", arguments.test),
        )
    )
    expected = embeddings(backbone, held_out)
    print(
        f"{backbone.name}: {backbone.count_params():,} parameters; "
        f"{len(expected)} texts of up to {arguments.length} tokens",
        flush=True,
    )
    converted, rows, paths, longer = None, {}, {}, {}
    if arguments.compare_length:
        longer[SOFTMAX] = lengthen(backbone, arguments.compare_length)
    for name in arguments.attention:
        started = time.perf_counter()
        made = _convert(backbone, name, fitted, arguments)
        seconds = time.perf_counter() - started
        paths[name] = by_path(expected, made, held_out)
        layers = made.attention_layers
        replaced = "all" if layers is None else len(layers)
        rows[name] = _row(name, paths[name], replaced, seconds)
        if arguments.compare_length:
            longer[name] = lengthen(made, arguments.compare_length)
        if converted is None:
            converted = made
            _check_transfer(arguments, converted)

    times = {}
    if arguments.compare_length:
        times = _compare_times(longer, paths, arguments.compare_length, folder)
    print(f"\n== {arguments.attention[0]}\n")
    print(swap_report(backbone, converted, held_out[0]), flush=True)
    if arguments.lengths:
        measure(backbone, converted, arguments.lengths, arguments.time_limit)
    if arguments.steps or arguments.transfer_steps:
        seconds = _distill(original, converted, splits["train"], arguments)
        name = f"{arguments.attention[0]}, distilled"
        paths[name] = by_path(expected, converted, held_out)
        rows[name] = _row(name, paths[name], "", seconds)
    show(*_table(rows, times, arguments), arguments)
    (folder / "paths.json").write_text(json.dumps(paths, indent=2) + "\n")
    plot(folder / "paths.png", paths)
    _save(converted, original.preprocessor, held_out, folder)


def _row(name, paths, replaced, seconds):
    """The cells of `HEADER` after the name, as texts, which it prints."""
    mean, least = paths[WHOLE]
    alone = [f"{paths[path][0]:.4f}" if path in paths else "-" for path in PATHS]
    cells = [f"{mean:.4f}", f"{least:.4f}", *alone, str(replaced), f"{seconds:.1f}"]
    print(name, *cells, flush=True)
    return cells


def _table(rows, times, arguments):
    """Header and rows: similarity, and time where it is measured."""
    if not times:
        return HEADER, [[name, *row] for name, row in rows.items()]
    header = [*HEADER, f"ms of {arguments.compare_length:,} tokens", "of softmax"]
    rows = {SOFTMAX: ["1"] + ["-"] * (len(HEADER) - 2)} | rows
    none = "-", "-"
    return header, [[name, *row, *times.get(name, none)] for name, row in rows.items()]


def by_path(expected, converted, held_out):
    """`(mean, least)` cosine of a model's embeddings, by the path of its layers.

    Args:
        expected: The original's embeddings.
        converted: A backbone.
        held_out: List of inputs.
    """
    sites = converted.attention_sites
    paths = {WHOLE: lambda sites: contextlib.nullcontext()}
    if any(map(has_two_paths, sites)):
        paths |= PATHS
    found = {}
    for name, path in paths.items():
        with path(sites):
            cosine = cosines(expected, embeddings(converted, held_out))
        found[name] = float(cosine.mean()), float(cosine.min())
    return found


def _compare_times(models, paths, length, folder):
    """Plots each attention's cosine and time, as a share of softmax's.

    Returns:
        Dict by attention, also softmax, of two cells: milliseconds and that share.
    """
    seconds = seconds_in_turns(models, length)
    softmax = seconds[SOFTMAX]
    points = {name: (seconds[name] / softmax, paths[name][WHOLE][0]) for name in paths}
    (folder / "accuracy.json").write_text(json.dumps(points, indent=2) + "\n")
    plot_accuracy(folder / "accuracy.png", points, length)
    return {
        name: (f"{1e3 * own:.0f}", f"{own / softmax:.2f}")
        for name, own in seconds.items()
    }


def _distill(original, converted, text, arguments):
    """Distils, each stage on its own texts, and returns the seconds that it took."""
    started = time.perf_counter()
    texts = originals.batches(
        text, arguments.batch, original.text_bytes, arguments.seed
    )
    inputs = ((original.inputs_of(batch),) for batch in texts)
    for steps, epochs in (
        (arguments.transfer_steps, (1, 0)),
        (arguments.steps, (0, 1)),
    ):
        if steps:
            distill(
                original.backbone,
                converted,
                inputs,
                *epochs,
                steps_per_epoch=steps,
                transfer_learning_rate=arguments.transfer_learning_rate,
                learning_rate=arguments.learning_rate,
                lora_rank=arguments.lora_rank or None,
                window_dropout=arguments.window_dropout,
                verbose=arguments.verbose,
            )
    return time.perf_counter() - started


def _check_transfer(arguments, converted):
    layers = [adapter.attention for adapter in converted.attention_adapters]
    if arguments.transfer_steps and not any(
        layer.trainable_variables for layer in layers
    ):
        raise UsageError(
            f"--transfer-steps must be 0 for --attention {arguments.attention[0]}, "
            "which has no weights of its own to train; received --transfer-steps "
            f"{arguments.transfer_steps}"
        )


def _original(arguments, splits):
    if arguments.preset:
        return originals.load(arguments.preset, arguments.length)
    return originals.train(
        splits,
        arguments.length,
        arguments.train_steps,
        arguments.batch,
        arguments.seed,
        arguments.verbose,
    )


def _batches(original, data, count, arguments):
    texts = originals.batches(
        data, arguments.batch, original.text_bytes, arguments.seed
    )
    return [original.inputs_of(batch) for batch in itertools.islice(texts, count)]


def _convert(backbone, name, fitted, arguments):
    automatic = arguments.budget is not None
    layers = "auto" if automatic else arguments.layers
    options = dict(budget=arguments.budget)
    try:
        layer_class, chosen = parse_attention(name)
        fits = layer_class is VQAttention or chosen.get("calibrated")
        if fits or automatic:
            options["calibrate"] = fitted
        return convert_backbone(backbone, name, layers, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--attention {name}: {error}") from error


def _save(converted, preprocessor, held_out, folder):
    preset = folder / "preset"
    converted.save_to_preset(str(preset))
    preprocessor.save_to_preset(str(preset))
    loaded = keras_hub.models.Backbone.from_preset(str(preset))
    first, second = (
        embeddings(backbone, held_out[:1]) for backbone in (converted, loaded)
    )
    difference = np.max(abs(first - second))
    print(
        f"\nsaved {preset}, which loads as {type(loaded).__name__} "
        f"(largest difference {difference:.1e})"
    )
