"""`distill`: trains a converted model to reproduce the original's outputs."""

import collections
import contextlib
import itertools
import math
import numbers
import os

import keras
import keras_hub

from keras_efficient_attn.layers.keras_internals import (
    lora_variables,
    projections,
)
from keras_efficient_attn.models.conversion.backbone import EfficientBackbone
from keras_efficient_attn.models.conversion.distillation_stages import (
    AttentionTransfer,
    StateDistillation,
    backbone_of,
)
from keras_efficient_attn.models.conversion.sites import find_sites
from keras_efficient_attn.models.conversion.trace import batches
from keras_efficient_attn.ops.common.checks import (
    check_int,
    check_positive_int,
    check_positive_number,
)

WARM_UP = 1 / 20
# Clipping norm of each weight's gradient.
LARGEST_NORM = 1.0


def distill(
    teacher,
    student,
    data,
    transfer_epochs: int = 1,
    epochs: int = 1,
    steps_per_epoch=None,
    transfer_learning_rate: float = 1e-2,
    learning_rate: float = 1e-3,
    lora_rank: int | None = 8,
    window_dropout: float = 0.5,
    backup_dir: str | None = None,
    callbacks=None,
    verbose="auto",
):
    """Trains a converted model, in place, to reproduce the original's outputs.

    Has two stages, which need texts but no labels:

    1. *Attention transfer* trains the new layers' own weights (learned feature maps,
       soft codes) and freezes all others. Each layer is trained
       separately: it reads the inputs of the layer that it replaces in the teacher. Its
       loss is `Σ‖new − old‖² / Σ‖old‖²` of their outputs. If the new layers have no
       own weights, the stage is skipped.
    2. *State distillation* trains the whole student: low-rank changes (LoRA) of the
       attention layers' projections and the layers' own weights, or with
       `lora_rank=None` all weights. Its loss is the same error of the blocks' output
       states, plus the divergence `KL(teacher ‖ student)` of the logits for tasks, or
       the error of the outputs for backbones.

    If a layer has a window and an estimate, the window dominates and the estimate
    learns little. So in each step each such layer drops its window at a rate that falls
    linearly to 0 in each stage; the estimate then covers all keys. Dropout is off, and
    fitted hard codes do not change.

    Both stages are Keras' `fit` with Adam, with a cosine learning-rate schedule after a
    warm-up. The progress bar shows the loss.

    Args:
        teacher: The original: a `keras_hub.models.Backbone`, or a task with one. It
            stays as it is.
        student: A backbone from `convert_backbone`, or a task with one; of the kind
            of `teacher`.
        data: Inputs of the models: a batch as the models take it (of a tuple
            `(inputs, targets)`, the inputs, as in `convert_backbone`), a list of
            batches, or what `fit` takes of further kinds (a generator or a
            `tf.data.Dataset`, a `DataLoader`, a `PyDataset` of tuples `(inputs,)`).
            Each epoch reads a list or a `PyDataset` in its order; both stages read on
            in one generator.
        transfer_epochs: Epochs of the first stage; 0 leaves it out. Defaults to 1.
        epochs: Epochs of the second stage; 0 leaves it out. Defaults to 1.
        steps_per_epoch: Steps of an epoch, which data without a length needs, and
            which must be the length of other data. Defaults to `None`: all of it.
        transfer_learning_rate: The largest rate of the first stage. Defaults to 1e-2.
        learning_rate: The largest rate of the second stage. Defaults to 1e-3.
        lora_rank: Rank of the changes of the projections; `enable_lora` of the
            student's backbone freezes its other weights, and they stay so; heads of
            tasks and biases do not train either. A student that has LoRA already
            keeps its own. `None` trains all weights that are trainable. Defaults to 8.
        window_dropout: The rate at first, from 0 to 1. Defaults to 0.5.
        backup_dir: Folder of checkpoints after each epoch, one file per stage, of what
            training changes: the same call with a student that is converted alike
            resumes from it, and ends with the same weights if `data` has the same
            order (a generator must restart at its first batch; batches already used
            are skipped).
            Defaults to `None`: none.
        callbacks: List of Keras' callbacks, for both stages. Defaults to `None`.
        verbose: As for `fit`.

    Returns:
        Dict of Keras' `History` for each stage that ran: `"transfer"`, `"states"`.

    Raises:
        ValueError: If the student is not converted, or its layers, or its kind, are
            not those of the teacher; if an argument is out of range; if data
            without a length comes without `steps_per_epoch`, or other data with
            another number; or if a checkpoint is damaged, or not of this student.

    Example:

    >>> import keras_hub, numpy as np
    >>> from keras_efficient_attn import models
    >>> teacher = keras_hub.models.BertBackbone(
    ...     vocabulary_size=50, num_layers=1, num_heads=2, hidden_dim=16,
    ...     intermediate_dim=16)
    >>> student = models.convert_backbone(
    ...     teacher, "performer:feature_map=learned,window=4")
    >>> ids = np.random.default_rng(0).integers(1, 50, (2, 16))
    >>> batch = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": ids > 0}
    >>> history = models.distill(teacher, student, [batch], epochs=2, verbose=0)
    >>> len(history["states"].history["loss"])
    2

    Reference:
        - [Zhang et al., 2024](https://arxiv.org/abs/2410.10254), LoLCATs
        - [Zhang et al., 2024](https://arxiv.org/abs/2402.04347), Hedgehog
    """
    _check_models(teacher, student)
    check_int("transfer_epochs", transfer_epochs, 0)
    check_int("epochs", epochs, 0)
    number = isinstance(window_dropout, numbers.Real)
    if not number or not 0 <= window_dropout <= 1:
        raise ValueError(
            "`window_dropout` must be a number from 0 to 1. Received: "
            f"window_dropout={window_dropout!r}"
        )
    check_positive_int("lora_rank", lora_rank, optional=True)
    check_positive_number("transfer_learning_rate", transfer_learning_rate)
    check_positive_number("learning_rate", learning_rate)
    adapters = backbone_of(student).attention_adapters
    if isinstance(data, dict | list | tuple) or hasattr(data, "shape"):
        data = BatchList(batches(data, "data"))
    steps = _steps_per_epoch(data, steps_per_epoch)
    # In an order of its own, an epoch that is resumed would read other batches.
    options = dict(verbose=verbose, steps_per_epoch=steps_per_epoch, shuffle=False)
    histories = {}

    def fit(name, stage_class, trained, count, rate):
        stage = stage_class(teacher, student, trained, window_dropout, count * steps)
        stage.compile(_optimizer(rate, count * steps))
        own, done = list(callbacks or ()), 0
        if backup_dir is not None:
            backup = Backup(os.path.join(backup_dir, f"{name}.npz"))
            done = backup.restore(stage) // steps
            own.append(backup)
        options["initial_epoch"] = done
        with _share_of(data, count * steps, done * steps) as share:
            histories[name] = _fit(stage, share, count, own, options)

    own_weights = _own_weights(adapters)
    if own_weights and transfer_epochs:
        rate = transfer_learning_rate
        fit("transfer", AttentionTransfer, own_weights, transfer_epochs, rate)
    if epochs:
        trained = student.trainable_variables
        if lora_rank is not None:
            _enable_lora(backbone_of(student), lora_rank)
            trained = lora_variables(student) + _own_weights(adapters)
        fit("states", StateDistillation, trained, epochs, learning_rate)
    return histories


class Backup(keras.callbacks.Callback):
    """Keeps what a stage changes in one file, after each epoch.

    Args:
        path: The file's path.
    """

    def __init__(self, path):
        super().__init__()
        self.path = path

    def restore(self, stage):
        """The steps that were done when the file was written; 0 without a file."""
        if os.path.exists(self.path):
            stage.optimizer.build(stage.trainable_variables)
            stage.load_weights(self.path)
        return stage.steps_done

    def on_epoch_end(self, epoch, logs=None):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.model.save_weights(self.path)


class BatchList(keras.utils.PyDataset):
    """A list of batches of inputs."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return (self.batches[index],)


def _check_models(teacher, student):
    for name, model in (("teacher", teacher), ("student", student)):
        if not isinstance(model, keras_hub.models.Backbone | keras_hub.models.Task):
            raise TypeError(
                f"`{name}` must be a `keras_hub.models.Backbone`, or a task with one. "
                f"Received: {name}={model!r}"
            )
    if not isinstance(backbone_of(student), EfficientBackbone):
        raise ValueError(
            "`student` must come from `convert_backbone`, or be a task with such a "
            f"backbone. Received: a {type(backbone_of(student)).__name__}"
        )
    kinds = [isinstance(m, keras_hub.models.Task) for m in (teacher, student)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "`teacher` and `student` must both be backbones, or both tasks. Received: "
            f"a {type(teacher).__name__} and a {type(student).__name__}"
        )
    old, new = (len(find_sites(backbone_of(m))) for m in (teacher, student))
    if old != new:
        raise ValueError(
            "`teacher` and `student` must have the same number of self-attention "
            f"layers. Received: {old} and {new}"
        )


@contextlib.contextmanager
def _share_of(data, number, done):
    """The batches of a stage that are left of its number, where data is an iterator.

    Keras reads ahead: without a bound, the next stage would miss some of it.
    """
    if not isinstance(data, collections.abc.Iterator):
        yield data
        return
    share = itertools.islice(data, number)
    collections.deque(itertools.islice(share, done), maxlen=0)
    # Keras takes a generator, and no other iterator.
    yield (batch for batch in share)
    collections.deque(share, maxlen=0)


def _fit(stage, data, epochs, callbacks, options):
    """The history of what is left of a stage's epochs."""
    if options["initial_epoch"] < epochs:
        return stage.fit(data, epochs=epochs, callbacks=callbacks, **options)
    history = keras.callbacks.History()
    history.set_model(stage)
    history.on_train_begin()
    return history


def _steps_per_epoch(data, steps_per_epoch):
    check_positive_int("steps_per_epoch", steps_per_epoch, optional=True)
    try:
        length = len(data)
    except TypeError:
        length = None
    if length is None and steps_per_epoch is None:
        raise ValueError(
            "`data` without a length needs `steps_per_epoch`. Received: "
            f"data={data!r}, steps_per_epoch=None"
        )
    if None not in (length, steps_per_epoch) and length != steps_per_epoch:
        # Keras would end an epoch early, and begin the next in the middle of the data.
        raise ValueError(
            "`steps_per_epoch` must be None or the number of batches of `data`; pass a "
            "generator to read as many as you like. Received: "
            f"steps_per_epoch={steps_per_epoch}, {length} batches"
        )
    return steps_per_epoch or length


def _optimizer(learning_rate, steps):
    warm_up = math.ceil(WARM_UP * steps)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(steps - warm_up, 1),
        warmup_target=learning_rate,
        warmup_steps=warm_up,
    )
    return keras.optimizers.Adam(schedule, clipnorm=LARGEST_NORM)


def _enable_lora(backbone, rank):
    """Enables LoRA in all attention projections; own weights stay trainable."""
    adapters = backbone.attention_adapters
    if not any(layer.lora_enabled for layer in _projections(adapters)):
        names = dict.fromkeys(layer.name for layer in _projections(adapters))
        backbone.enable_lora(rank, target_layer_names=list(names))
    for adapter in adapters:
        adapter.attention.trainable = True


def _own_weights(adapters):
    """The trainable weights that efficient attention has and softmax has not."""
    return [v for adapter in adapters for v in adapter.attention.trainable_variables]


def _projections(adapters):
    return [
        layer
        for adapter in adapters
        for layer in projections(adapter).values()
        if hasattr(layer, "enable_lora")
    ]
