"""A run: train, evaluate, sample, and leave the results."""

import hashlib
import json
import math
import statistics
import time

import keras

from byte_lm import data, results
from byte_lm.checkpoints import Checkpoints, write_text
from byte_lm.finite_steps import keep_finite
from byte_lm.model import (
    OPTIONS,
    BitsPerByte,
    build_model,
    check_attention,
    trained_parameters,
)
from byte_lm.sampling import sample
from command_line import UsageError, make_folder, show_progress
from keras_efficient_attn import AdaptiveSpan
from keras_efficient_attn.layers import TrimSpans, plot_spans
from step_clock import StepClock

# Bytes that each epoch's validation scores, and that a sample continues.
VALIDATION_BYTES = 2**13
PROMPT_BYTES = 256
# Lengths of the windows of test text, in lengths of training.
MULTIPLES = (1, 4, 16)


class Recorder(StepClock):
    """After each epoch: a row of the curve, and a checkpoint.

    Args:
        checkpoints: Where to save.
        record: The run's record; its curve, step and skipped steps are kept up to
            date.
        on_nan: `"stop"` or `"skip"`: after a step that gave NaN, which `keep_finite`
            has undone.
    """

    def __init__(self, checkpoints, record, on_nan):
        super().__init__()
        self.checkpoints = checkpoints
        self.record = record
        self.on_nan = on_nan

    def on_train_begin(self, logs=None):
        curve = self.record["curve"]
        self.start = time.perf_counter() - (curve[-1]["seconds"] if curve else 0.0)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.record["step"] += 1
        if not math.isnan(logs["loss"]):
            return
        step = self.record["step"]
        if self.on_nan == "stop":
            kept = self.checkpoints.steps()
            raise UsageError(
                f"step {step} gave NaN or infinity; to go on from "
                f"{f'step {kept[0]}' if kept else 'the start'} without its batch, add "
                "--resume --on-nan skip"
            )
        self.record["skipped"].append(step)
        print(f"\nStep {step} gave NaN or infinity: its batch is skipped.", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self.start
        self.record["curve"].append(
            {
                "step": self.record["step"],
                "seconds": round(seconds, 1),
                "seconds_per_step": self.median,
                "bits_per_byte": float(logs["bits_per_byte"]),
                "val_bits_per_byte": float(logs["val_bits_per_byte"]),
            }
        )
        self.checkpoints.save(self.model, self.record)


def run(arguments, fixed):
    """Trains a model and leaves the results in `arguments.out`.

    Args:
        arguments: The parsed arguments.
        fixed: Those that a resumed run must share, as a dict.
    """
    check_attention(arguments.attention, arguments.dim, arguments.heads)
    splits = data.load_splits(arguments.text)
    for name, split in splits.items():
        needed = arguments.length * (MULTIPLES[-1] if name == "test" else 1) + 1
        if len(split) < needed:
            raise UsageError(
                f"--length {arguments.length} is too long: the {name} text has "
                f"{len(split)} bytes, and {needed} are needed"
            )
    keras.config.set_dtype_policy(arguments.dtype)
    keras.utils.set_random_seed(arguments.seed)
    checkpoints = Checkpoints(arguments.out)
    fixed = {**fixed, "text": hashlib.sha256(splits["train"]).hexdigest()}
    if arguments.resume and checkpoints.steps():
        model, record = checkpoints.restore(lambda record: check_same(record, fixed))
        print(f"Going on from step {record['step']} of {arguments.steps}.")
    else:
        if arguments.resume:
            # A run may be killed before its first checkpoint.
            print(f"No checkpoint in {checkpoints.folder} yet: starting afresh.")
        else:
            refuse_used_folder(checkpoints)
        model = new_model(arguments)
        record = {"step": 0, "curve": [], "skipped": [], **fixed}
    keep_finite(model)
    print(
        f"{keras.backend.backend()} backend, {arguments.attention} attention, "
        f"{trained_parameters(model):,} parameters; "
        + ", ".join(f"{len(split):,} {name}" for name, split in splits.items())
        + " bytes",
        flush=True,
    )
    make_folder(arguments.out)
    train(model, splits, arguments, checkpoints, record)
    finish(model, splits, arguments, record)


def check_same(record, fixed):
    """Raises `UsageError` if a checkpoint's record is of another run."""
    for name, value in fixed.items():
        if record.get(name) != value:
            option = f"--{name.replace('_', '-')}"
            received = "other text" if name == "text" else value
            trained = "" if name == "text" else f", {record.get(name)}"
            raise UsageError(
                f"--resume: {option} must be as in the run in --out{trained}; received "
                f"{received}"
            )


def refuse_used_folder(checkpoints):
    """Raises `UsageError` if a run would overwrite another's checkpoints."""
    steps = checkpoints.steps()
    if steps:
        raise UsageError(
            f"{checkpoints.folder} holds a run of {steps[0]} steps: continue it with "
            "--resume, or start afresh with another folder as --out"
        )


def new_model(arguments):
    """A compiled model, with a warm-up and then a cosine decay to zero."""
    options = {name: getattr(arguments, name) for name in OPTIONS}
    model = build_model(arguments.attention, **options)
    warmup = max(1, arguments.steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - warmup),
        warmup_target=arguments.learning_rate,
        warmup_steps=warmup,
    )
    # Muon for the matrices of the blocks, Adam for the rest.
    optimizer = keras.optimizers.Muon(
        schedule,
        weight_decay=0.1,
        adam_weight_decay=0.0,
        adam_beta_2=0.99,
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[BitsPerByte()],
    )
    # TensorFlow traces a step that creates variables a second time.
    optimizer.build(model.trainable_variables)
    return model


def train(model, splits, arguments, checkpoints, record):
    """Trains from the record's step to the last."""
    # Without AdaptiveSpan layers, there is nothing to trim.
    callbacks = [
        Recorder(checkpoints, record, arguments.on_nan),
        TrimSpans(arguments.epoch_steps),
    ]
    length = arguments.length
    validation = data.evaluation_windows(
        data.excerpts(splits["validation"], VALIDATION_BYTES, length), length
    )
    # A second round where --epoch-steps does not divide --steps.
    while record["step"] < arguments.steps:
        left = arguments.steps - record["step"]
        epoch_steps = min(arguments.epoch_steps, left)
        first_epoch = record["step"] // arguments.epoch_steps
        model.fit(
            data.batches(
                splits["train"],
                arguments.length,
                arguments.batch,
                arguments.seed,
                first_step=record["step"],
            ),
            shuffle=False,
            steps_per_epoch=epoch_steps,
            initial_epoch=first_epoch,
            epochs=first_epoch + left // epoch_steps,
            validation_data=validation,
            validation_batch_size=1,
            callbacks=callbacks,
            verbose=show_progress(),
        )


def bits_per_byte(model, text, length):
    """Bits per byte of a text in windows of a length, which are read one at a time.

    So softmax needs the memory for one row of scores only.
    """
    inputs, targets, weights = data.evaluation_windows(text, length)
    return model.evaluate(
        inputs,
        targets,
        sample_weight=weights,
        batch_size=1,
        return_dict=True,
        verbose=show_progress(),
    )["bits_per_byte"]


def finish(model, splits, arguments, record):
    """Evaluates, samples, and writes the results."""
    lengths = [multiple * arguments.length for multiple in MULTIPLES]
    test = data.excerpts(splits["test"], arguments.test_bytes, lengths[-1])
    baselines = data.compressed_bits_per_byte(test)
    print(
        f"Bits per byte of {len(test):,} bytes of test text: "
        + ", ".join(f"{name} {bits:.3f}" for name, bits in baselines.items()),
        flush=True,
    )
    bits = {}
    for length in lengths:
        bits[str(length)] = bits_per_byte(model, test, length)
        print(f"Model, in windows of {length:,}: {bits[str(length)]:.3f}", flush=True)

    out = arguments.out
    model.save(out / "model.keras")
    prompt = bytes(splits["test"][:PROMPT_BYTES])
    sampled, speed = sample(
        model, prompt, arguments.sample_bytes, arguments.temperature, arguments.seed
    )
    print(f"Sample after {len(prompt)} bytes of test text:")
    print(prompt.decode("utf-8", "replace"), end="")
    print(f"|{sampled.decode('utf-8', 'replace')}")
    print(f"{speed:,.0f} bytes per second")

    result = {
        "attention": arguments.attention,
        "parameters": trained_parameters(model),
        "bits_per_byte": bits,
        **baselines,
        "test_bytes": len(test),
        "skipped_steps": record["skipped"],
        "seconds_per_step": statistics.median(
            row["seconds_per_step"] for row in record["curve"]
        ),
        "sampled_bytes_per_second": speed,
    }
    layers = [block.attention for block in model.backbone.transformer_layers]
    layers = [layer for layer in layers if isinstance(layer, AdaptiveSpan)]
    if layers:
        result["spans"] = [layer.spans().tolist() for layer in layers]
        plot_spans(model, out / "spans.png")
        for number, layer in enumerate(layers, start=1):
            print(
                f"Layer {number}: average span {layer.spans().mean():.1f}, largest "
                f"{layer.spans().max():.1f}; window {layer.window} of {layer.max_span}"
            )
    results.write_curve(out / "curve.csv", record["curve"])
    curves = {arguments.attention: record["curve"]}
    results.plot_curves(out / "curve.png", curves, result)
    write_text(out / "result.json", json.dumps(result, indent=2) + "\n")
    print(f"Wrote model.keras, curve.csv, curve.png and result.json in {out}")
