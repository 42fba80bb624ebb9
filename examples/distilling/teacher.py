"""A causal byte model with softmax and rotary positions, trained once and reused."""

import json
from pathlib import Path

import keras
import keras_hub

from byte_lm import data
from command_line import UsageError

NUM_BYTES = 256
FILE, RECORD = "teacher.keras", "teacher.json"
# The arguments that make a teacher; `--text` besides.
ARGUMENTS = ("length", "steps", "dim", "layers", "heads", "batch", "learning_rate")


def load_or_train(arguments, splits):
    """The teacher in the folder of `--teacher`; trained and saved there if missing.

    Args:
        arguments: The parsed arguments.
        splits: From `byte_lm.data.load_splits`.

    Returns:
        A `keras_hub.models.LlamaCausalLM`.

    Raises:
        UsageError: If the teacher there was trained with other arguments.
    """
    folder = arguments.teacher
    wanted = {name: getattr(arguments, name) for name in ARGUMENTS}
    text = arguments.text
    wanted["text"] = None if text is None else str(Path(text).resolve())
    if (folder / FILE).exists():
        _check_record(folder, wanted)
        return keras.saving.load_model(folder / FILE)
    task = train(arguments, splits)
    # The model comes last, and whole: where it is, its record is too.
    (folder / RECORD).write_text(json.dumps(wanted) + "\n")
    unfinished = folder / f"unfinished_{FILE}"
    task.save(unfinished)
    unfinished.replace(folder / FILE)
    return task


def _check_record(folder, wanted):
    """Raises `UsageError` if a teacher was trained with other arguments."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--teacher {folder}: {RECORD}, which says how the teacher was trained, "
            f"cannot be read ({error}); choose another folder"
        ) from error
    for name, value in wanted.items():
        option = f"--{name.replace('_', '-')}"
        if name not in record:
            raise UsageError(
                f"--teacher {folder}: {RECORD} does not say with which {option} the "
                "teacher was trained; choose another folder"
            )
        if record[name] != value:
            raise UsageError(
                f"--teacher {folder} was trained with {option} {record[name]}: "
                f"pass the same, or choose another folder; received {option} {value}"
            )


def make_backbone(arguments, layers):
    """A Llama of bytes with random weights, and so many layers."""
    return keras_hub.models.LlamaBackbone(
        vocabulary_size=NUM_BYTES,
        num_layers=layers,
        num_query_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        hidden_dim=arguments.dim,
        intermediate_dim=3 * arguments.dim,
    )


def train(arguments, splits):
    """A new teacher, trained for `--steps` on rows of `--length` bytes."""
    keras.utils.set_random_seed(arguments.seed)
    backbone = make_backbone(arguments, arguments.layers)
    task = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    # KerasHub's tasks cannot be fitted to generators.
    model = keras.Model(task.input, task.output)
    warmup = max(1, arguments.steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, arguments.steps - warmup),
        warmup_target=arguments.learning_rate,
        warmup_steps=warmup,
    )
    model.compile(
        keras.optimizers.Muon(schedule, weight_decay=0.1, adam_weight_decay=0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        data.batches(
            splits["train"], arguments.length, arguments.batch, arguments.seed
        ),
        steps_per_epoch=arguments.steps,
        verbose=arguments.verbose,
    )
    return task
