"""The steps of `distill_byte_lm.py` after the teacher."""

import contextlib
import itertools
import json
import time
import warnings

import keras
import keras_hub
import numpy as np

from byte_lm import data
from command_line import UsageError
from distilling import measures
from distilling.plot import plot
from distilling.teacher import make_backbone
from keras_efficient_attn import VQAttention
from keras_efficient_attn.benchmark.report import align
from keras_efficient_attn.layers.attention.registry import parse_attention
from keras_efficient_attn.models import convert_backbone, distill, swap_report
from keras_efficient_attn.models.conversion.report import PATHS as PATHS_ALONE
from keras_efficient_attn.models.conversion.report import WHOLE
from tables import mean_and_spread

PATHS = {WHOLE: lambda sites: contextlib.nullcontext(), **PATHS_ALONE}


def check(arguments):
    """Raises `UsageError`, before anything is trained, for what cannot be distilled."""
    with warnings.catch_warnings(action="ignore"):
        student = convert(make_backbone(arguments, 1), None, arguments)
    layers = [adapter.attention for adapter in student.attention_adapters]
    if arguments.transfer_steps and not any(
        layer.trainable_variables for layer in layers
    ):
        raise UsageError(
            f"--transfer-steps must be 0 for --attention {arguments.attention}, which "
            "has no weights of its own to train; received --transfer-steps "
            f"{arguments.transfer_steps}"
        )


def run(arguments, splits, teacher):
    """Converts, distils, measures, prints and saves.

    Args:
        arguments: The parsed arguments, with the `seed` and folders of this run.
        splits: From `byte_lm.data.load_splits`.
        teacher: A `keras_hub.models.LlamaCausalLM`.

    Returns:
        What `result.json` has: the `lengths` of windows, and the `rows` of the teacher
        and the student, lists of the bits per byte at each length and of the generated
        bytes that agree.
    """
    keras.utils.set_random_seed(arguments.seed)
    backbone = convert(teacher.backbone, splits, arguments)
    student = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    lengths = [factor * arguments.length for factor in arguments.factors]
    rows = random_rows(splits["test"], arguments)
    prompts = rows[:, : arguments.length]
    expected = measures.continuations(teacher, prompts, arguments.generated)
    rest = splits, lengths, (prompts, expected), arguments
    rows_of = {"teacher": row(teacher, *rest)}
    rows_of |= rows_by_path("converted", student, *rest)
    seconds = train(teacher, student, splits, arguments)
    rows_of |= rows_by_path("distilled", student, *rest)
    steps = arguments.transfer_steps + arguments.distill_steps
    print(
        f"\n{arguments.attention}: {steps} steps of distillation, "
        f"{steps / arguments.steps:.1%} of the teacher's {arguments.steps}, in "
        f"{seconds:.0f} s\n"
    )
    inputs = data.model_inputs(prompts)
    print(f"\n{swap_report(teacher, student, inputs)}", flush=True)
    times = generation_times(teacher, student, arguments.time_lengths)
    result = {"lengths": lengths, "rows": rows_of, "times": times, "steps": steps}
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(arguments.out / "result.png", lengths, rows_of)
    student.save(arguments.out / "student.keras")
    print(f"\nwrote student.keras, result.json and result.png in {arguments.out}")
    return result


def table(results):
    """Header and rows: means over the results of `run`, and standard deviations.

    Bits per byte beyond the teacher's are paired by seed: teachers differ more.
    """
    lengths = results[0]["lengths"]
    header = [
        "bits per byte at",
        *(f"{n:,}" for n in lengths),
        *(f"beyond the teacher at {n:,}" for n in lengths),
        "bytes that agree",
    ]
    lines = []
    for name in results[0]["rows"]:
        found = []
        for rows in (result["rows"] for result in results):
            *bits, agreed = rows[name]
            beyond = [x - y for x, y in zip(bits, rows["teacher"], strict=False)]
            found.append([*bits, *beyond, agreed])
        columns = zip(*found, strict=True)
        cells = ("-" if None in x else mean_and_spread(x, 3) for x in columns)
        lines.append([name, *cells])
    return header, lines


def random_rows(text, arguments):
    """Rows of held-out text for continuations, `(prompts, length + generated)`."""
    size = arguments.length + arguments.generated
    starts = np.random.default_rng(arguments.seed).integers(
        0, len(text) - size, size=arguments.prompts
    )
    return text[starts[:, None] + np.arange(size)].astype("int32")


def convert(backbone, splits, arguments):
    """The student's backbone, fitted to validation text, if any, where it can be."""
    try:
        layer_class, options = parse_attention(arguments.attention)
        fitted = None
        if splits and (layer_class is VQAttention or options.get("calibrated")):
            fitted = _validation_batches(splits, arguments)
        return convert_backbone(backbone, arguments.attention, calibrate=fitted)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--attention {arguments.attention}: {error}") from error


def _validation_batches(splits, arguments):
    texts = data.batches(
        splits["validation"], arguments.length, arguments.batch, arguments.seed
    )
    return [inputs for inputs, _ in itertools.islice(texts, arguments.calibration)]


def row(task, splits, lengths, continued, arguments):
    """Bits per byte at each length, and generated bytes that match the teacher's.

    Args:
        task: A causal language model.
        splits: From `byte_lm.data.load_splits`.
        lengths: Lengths of windows.
        continued: Prompts, and the teacher's continuations of them.
        arguments: The parsed arguments.
    """
    bits = [
        measures.bits_per_byte(task, splits["test"], length, arguments.test_bytes)
        for length in lengths
    ]
    prompts, expected = continued
    made = measures.continuations(task, prompts, arguments.generated)
    found = [*bits, measures.agreement(expected, made)]
    print("measured", *(f"{value:.3f}" for value in found), flush=True)
    return found


def rows_by_path(kind, student, *rest):
    """The row of a student with each path of its layers, a dict.

    Generation needs states, which a window alone lacks, so its bytes are not compared.
    """
    found = {}
    for name, path in PATHS.items():
        with path(student.backbone.attention_sites):
            found[f"{kind}, {name}"] = row(student, *rest)
    found[f"{kind}, window only"][-1] = None
    return found


def train(teacher, student, splits, arguments):
    """Distils, and returns the seconds taken."""
    started = time.perf_counter()

    def batches(first_step):
        texts = data.batches(
            splits["train"],
            arguments.length,
            arguments.batch,
            arguments.seed + 1,
            first_step,
        )
        return ((inputs,) for inputs, _ in texts)

    stages = arguments.transfer_steps, arguments.distill_steps
    options = dict(
        transfer_learning_rate=arguments.transfer_learning_rate,
        learning_rate=arguments.distill_learning_rate,
        lora_rank=arguments.lora_rank or None,
        window_dropout=arguments.window_dropout,
        verbose=arguments.verbose,
    )
    # One epoch per stage, each with its own number of steps.
    for index, steps in enumerate(stages):
        if steps:
            distill(
                teacher,
                student,
                batches(index * stages[0]),
                transfer_epochs=int(index == 0),
                epochs=int(index == 1),
                steps_per_epoch=steps,
                **options,
            )
    return time.perf_counter() - started


def generation_times(teacher, student, lengths):
    """Prints and returns ms and MiB per generated byte after contexts."""
    rows = [("context", "teacher ms", "MiB", "student ms", "MiB", "times faster")]
    times = {}
    for length in lengths:
        old = measures.teacher_generation(teacher, length)
        new = measures.student_generation(student, length)
        times[length] = {"teacher": old, "student": new}
        cells = [f"{value:.2f}" for s, mib in (old, new) for value in (1e3 * s, mib)]
        rows.append((str(length), *cells, f"{old[0] / new[0]:.1f}"))
    if lengths:
        print("", "a generated byte, one text:", *align(rows), sep="\n", flush=True)
    return times
