"""A causal byte model with softmax and rotary positions, trained once and reused."""

import json

import keras
import keras_hub

from byte_lm import data
from command_line import UsageError

NUM_BYTES = 256
FILE, RECORD = "teacher.keras", "teacher.json"


def load_or_train(arguments, splits):
    """The teacher in the folder of `--teacher`; trained and saved there if missing.

    Args:
        arguments: The parsed arguments.
        splits: From `byte_lm.data.load_splits`.

    Returns:
        A `keras_hub.models.LlamaCausalLM` and the number of steps of its training.
    """
    folder = arguments.teacher
    if (folder / FILE).exists():
        record = json.loads((folder / RECORD).read_text())
        if record["length"] != arguments.length:
            raise UsageError(
                f"--teacher {folder}: trained with --length {record['length']}; "
                f"received {arguments.length}"
            )
        return keras.saving.load_model(folder / FILE), record["steps"]
    task = train(arguments, splits)
    task.save(folder / FILE)
    record = {name: getattr(arguments, name) for name in ("length", "steps")}
    (folder / RECORD).write_text(json.dumps(record) + "\n")
    return task, arguments.steps


def train(arguments, splits):
    """A new teacher, trained for `--steps` on rows of `--length` bytes."""
    keras.utils.set_random_seed(arguments.seed)
    dim = arguments.dim
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=NUM_BYTES,
        num_layers=arguments.layers,
        num_query_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        hidden_dim=dim,
        intermediate_dim=3 * dim,
    )
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
