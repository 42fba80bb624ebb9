"""The steps of `swap_attention.py`."""

import itertools
import time

import keras_hub
import numpy as np

from command_line import UsageError
from keras_efficient_attn import VQAttention
from keras_efficient_attn.layers.attention.registry import parse_attention
from keras_efficient_attn.models import convert_backbone, swap_report
from swapping import original as originals
from swapping.cost import measure
from swapping.similarity import cosines, embeddings, fine_tune


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
    converted = None
    width = max(map(len, arguments.attention)) + 2
    print(f"\n{'attention':<{width}}{'cosine':>8}{'least':>8}{'replaced':>10}{'s':>7}")
    for name in arguments.attention:
        started = time.perf_counter()
        made = _convert(backbone, name, fitted, arguments)
        seconds = time.perf_counter() - started
        cosine = cosines(expected, embeddings(made, held_out))
        layers = made.attention_layers
        print(
            f"{name:<{width}}{cosine.mean():>8.4f}{cosine.min():>8.4f}"
            f"{'all' if layers is None else len(layers):>10}{seconds:>7.1f}",
            flush=True,
        )
        if arguments.window_budget:
            print("  windows:", *_windows(made), flush=True)
        converted = made if converted is None else converted

    print(f"\n== {arguments.attention[0]}\n")
    print(swap_report(backbone, converted, held_out[0]), flush=True)
    if arguments.lengths:
        measure(backbone, converted, arguments.lengths, arguments.time_limit)
    if arguments.steps:
        texts = originals.batches(
            splits["train"], arguments.batch, original.text_bytes, arguments.seed
        )
        fine_tune(
            backbone,
            converted,
            map(original.inputs_of, texts),
            arguments.steps,
            arguments.learning_rate,
            arguments.verbose,
        )
        cosine = cosines(expected, embeddings(converted, held_out))
        print(
            f"\nafter {arguments.steps} steps of training: cosine {cosine.mean():.4f}, "
            f"least {cosine.min():.4f}",
            flush=True,
        )
    _save(converted, original.preprocessor, held_out, folder)


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
    options = dict(budget=arguments.budget, window_budget=arguments.window_budget)
    try:
        layer_class, chosen = parse_attention(name)
        fits = layer_class is VQAttention or chosen.get("calibrated")
        if fits or automatic or arguments.window_budget:
            options["calibrate"] = fitted
        return convert_backbone(backbone, name, layers, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--attention {name}: {error}") from error


def _windows(backbone):
    return [adapter.kernel.window for adapter in backbone.attention_adapters]


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
