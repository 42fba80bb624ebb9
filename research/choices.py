"""The steps of `compare_choices.py`."""

import keras

from byte_lm import data
from command_line import UsageError
from keras_efficient_attn.benchmark.report import align
from keras_efficient_attn.models.conversion.backbone import apply_plan
from keras_efficient_attn.models.conversion.fit import fit
from keras_efficient_attn.models.conversion.layer_search import (
    block_error,
    output_effect,
)
from keras_efficient_attn.models.conversion.plan import plan_conversion
from keras_efficient_attn.models.conversion.specification import with_window
from keras_efficient_attn.models.conversion.trace import trace
from keras_efficient_attn.models.conversion.window_search import choose_windows
from swapping import original as originals

TEACHER = "teacher.keras"


def run(arguments, splits):
    """Chooses both ways, and prints what each choice does to the output."""
    keras.utils.set_random_seed(arguments.seed)
    backbone, chosen_on, tested_on = _model_and_batches(arguments, splits)
    plan = plan_conversion(backbone, arguments.attention)
    records = trace(backbone, plan.chosen_sites, [chosen_on])
    compare_layers(plan, records, chosen_on, tested_on)
    for budget in arguments.window_budgets:
        compare_windows(plan, records, budget, chosen_on, tested_on)


def compare_layers(plan, records, chosen_on, tested_on):
    """Prints the effect of the first layers of both orders, for each number of them."""
    converted = apply_plan(plan)
    fit(converted.attention_adapters, plan.chosen_sites, records)
    indices = range(len(plan.sites))
    orders = []
    for measure in (block_error, output_effect):
        harm = measure(plan, converted, [chosen_on])
        alone = [harm([index]) for index in indices]
        orders.append(sorted(indices, key=alone.__getitem__))
    effect = output_effect(plan, converted, [tested_on])
    rows = [("layers", "by last block", "by output", "effects", "")]
    for count in indices[1:]:
        chosen = [order[:count] for order in orders]
        cells = [f"{effect(layers):.3g}" for layers in chosen]
        names = [" ".join(map(str, sorted(layers))) for layers in chosen]
        rows.append((str(count), *names, *cells))
    print(*align(rows), sep="\n", flush=True)


def compare_windows(plan, records, budget, chosen_on, tested_on):
    """Prints the effect of windows that are chosen in both ways."""
    narrow = plan.replace(attention=[with_window(spec, 1) for spec in plan.specs])
    rows = [(f"mean window {budget:g}", "windows", "effect")]
    for name in ("by layers", "by output"):
        converted = apply_plan(narrow)
        adapters = converted.attention_adapters
        by_output = name == "by output"
        effect = output_effect(plan, converted, [chosen_on]) if by_output else None
        windows = choose_windows(budget, adapters, plan.chosen_sites, records, effect)
        found = output_effect(plan, converted, [tested_on])(range(len(windows)))
        rows.append((name, " ".join(map(str, windows)), f"{found:.3g}"))
    print("", *align(rows), sep="\n", flush=True)


def _model_and_batches(arguments, splits):
    """A backbone, and a batch of validation and one of test text."""
    sizes = arguments.length, arguments.batch, arguments.seed
    parts = splits["validation"], splits["test"]
    if arguments.teacher is not None:
        path = arguments.teacher / TEACHER
        if not path.exists():
            raise UsageError(f"--teacher {arguments.teacher}: has no {TEACHER}")
        task = keras.saving.load_model(path)
        return task.backbone, *(next(data.batches(p, *sizes))[0] for p in parts)
    original = originals.load(arguments.preset, arguments.length)
    size = original.text_bytes
    texts = (
        next(originals.batches(p, arguments.batch, size, arguments.seed)) for p in parts
    )
    return original.backbone, *map(original.inputs_of, texts)
