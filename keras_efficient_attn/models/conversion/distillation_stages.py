"""The two stages of distillation, as models that Keras' `fit` trains."""

import os
import zipfile

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_efficient_attn.models.conversion.paths import (
    drop_windows,
    has_two_paths,
)
from keras_efficient_attn.models.conversion.sites import find_sites
from keras_efficient_attn.models.conversion.trace import (
    position_mask,
    record_calls,
    run,
)


def backbone_of(model):
    """The backbone of a task; a backbone itself."""
    return model.backbone if isinstance(model, keras_hub.models.Task) else model


class DistillationStage(keras.Model):
    """Base: a model of a teacher and a student that trains some weights.

    Its output is the loss. It trains only the given weights, independent of Keras'
    `trainable`, which stays unchanged in teacher and student. Only windows are dropped,
    so that the two can agree.

    Args:
        teacher, student: Backbones or tasks of KerasHub.
        trained: List of variables of the student.
        window_dropout: The initial rate at which each layer with two paths drops its
            window; it falls linearly to 0 at the last step.
        steps: Number of steps of the stage.
    """

    def __init__(self, teacher, student, trained, window_dropout, steps):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.window_dropout, self.steps = window_dropout, steps
        self._trained = frozenset(map(id, trained))
        old, new = find_sites(backbone_of(teacher)), find_sites(backbone_of(student))
        self._sites = tuple(zip(old, new, strict=True))
        self._step = self.add_weight(
            name="step",
            shape=(),
            initializer="zeros",
            dtype="float32",
            trainable=False,
            autocast=False,
        )
        self._seed_generator = keras.random.SeedGenerator()
        self.built = True

    trainable_variables = property(lambda self: self._select(self.variables, True))
    non_trainable_variables = property(lambda self: self._select(self.variables, False))
    trainable_weights = property(lambda self: self._select(self.weights, True))
    non_trainable_weights = property(lambda self: self._select(self.weights, False))

    def _select(self, variables, trained):
        """The variables that are trained, or the others."""
        return [v for v in variables if (id(v) in self._trained) == trained]

    def call(self, inputs, training=None):
        if not training:
            return self.error(inputs)
        step = ops.convert_to_tensor(self._step)
        sites = [new for _, new in self._sites if has_two_paths(new)]
        if not self.window_dropout:
            sites = []
        draws = keras.random.uniform((len(sites),), seed=self._seed_generator)
        left = 1.0 - step / self.steps
        with drop_windows(sites, draws < self.window_dropout * left):
            error = self.error(inputs)
        # Last: on some backends this changes the step's tensor.
        self._step.assign_add(1.0)
        return error

    def error(self, inputs):
        """The loss on a batch, a scalar."""
        raise NotImplementedError

    def save_weights(self, filepath, overwrite=True):
        """Saves the trained weights and the optimizer.

        Keras merges LoRA into saved weights and zeroes both factors on loading: their
        gradients would then stay zero.
        """
        if not overwrite and os.path.exists(filepath):
            raise FileExistsError(
                "`filepath` exists: choose another, or remove the file. Received: "
                f"filepath={filepath}"
            )
        arrays = [_wide_array(variable) for variable in self._changing_variables]
        # A run that is killed while it writes leaves the file before as it was.
        unfinished = f"{filepath}.unfinished"
        with open(unfinished, "wb") as file:
            np.savez(file, *arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, filepath)

    def load_weights(self, filepath):
        """Loads what `save_weights` saved, which is neither compressed nor pickled."""
        try:
            with zipfile.ZipFile(filepath) as archive:
                damaged = archive.testzip()
                size = sum(member.file_size for member in archive.infolist())
        except zipfile.BadZipFile as error:
            damaged = str(error)
        if damaged:
            raise ValueError(
                f"The checkpoint is damaged ({damaged}): remove the file to start the "
                f"stage again. Received: filepath={filepath}"
            )
        if size > os.path.getsize(filepath):
            raise ValueError(
                f"`filepath` has arrays of {size:,} bytes, more than the file, and is "
                "not from `distill`: remove the file to start the stage again. "
                f"Received: filepath={filepath}"
            )
        with np.load(filepath, allow_pickle=False) as arrays:
            variables = self._changing_variables
            shapes = [tuple(variable.shape) for variable in variables]
            if [arrays[name].shape for name in arrays.files] != shapes:
                raise ValueError(
                    "The checkpoint is of another student, or of other options, as the "
                    "shapes of its arrays differ: use another file. Received: "
                    f"filepath={filepath}"
                )
            for variable, name in zip(variables, arrays.files, strict=True):
                variable.assign(arrays[name])

    @property
    def _changing_variables(self):
        own = [self._step, self._seed_generator.state]
        return [*self.trainable_variables, *own, *self.optimizer.variables]

    @property
    def steps_done(self):
        """The number of steps of training so far, an integer."""
        return int(ops.convert_to_numpy(self._step))

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return y_pred


class AttentionTransfer(DistillationStage):
    """Stage one: each replaced layer separately, on the teacher's inputs.

    The loss is the mean over layers of `Σ‖new − old‖² / Σ‖old‖²`, of the layers'
    outputs.
    """

    def error(self, inputs):
        pairs = [(old, new) for old, new in self._sites if new.is_converted]
        with record_calls([old.layer for old, _ in pairs]) as calls:
            run(self.teacher, inputs, training=False)
        errors = []
        for (old, new), made in zip(pairs, calls, strict=True):
            for call in made:
                output = new.layer(*call.args, **{**call.kwargs, "training": False})
                errors.append(
                    squared_error(call.output, output, position_mask(old, call))
                )
        return sum(errors) / len(errors)


class StateDistillation(DistillationStage):
    """Stage two: the whole student, on the teacher's hidden states and outputs.

    The loss is the mean over blocks of `Σ‖new − old‖² / Σ‖old‖²`, of their outputs,
    plus the divergence of logits for tasks, or the same error of the outputs for
    backbones.
    """

    def error(self, inputs):
        blocks = [pair for pair in self._sites if pair[1].in_one_block]
        old_layers = [old.layer for old, _ in blocks] + [old.block for old, _ in blocks]
        with record_calls(old_layers) as old_calls:
            expected = run(self.teacher, inputs, training=False)
        with record_calls([new.block for _, new in blocks]) as new_calls:
            output = self.student(inputs, training=False)
        errors, mask = [], None
        attention, old_calls = old_calls[: len(blocks)], old_calls[len(blocks) :]
        for (old, _), *made in zip(
            blocks, attention, old_calls, new_calls, strict=True
        ):
            for call, before, after in zip(*made, strict=True):
                mask = position_mask(old, call)
                errors.append(squared_error(before.output, after.output, mask))
        hidden = sum(errors) / max(len(errors), 1)
        if isinstance(self.student, keras_hub.models.Task):
            return hidden + divergence(expected, output, mask)
        if not isinstance(expected, dict):
            return hidden + squared_error(expected, output, mask)
        outputs = [
            squared_error(old, output[name], mask_of_output(name, inputs))
            for name, old in expected.items()
        ]
        return hidden + sum(outputs) / len(outputs)


def mask_of_output(name, inputs):
    """The padding of an output of a backbone of KerasHub, or `None`.

    An encoder-decoder has two of each: `encoder_sequence_output` belongs to
    `encoder_padding_mask`.
    """
    prefix = name.removesuffix("sequence_output")
    mask = inputs.get(f"{prefix}padding_mask") if isinstance(inputs, dict) else None
    return None if mask is None else ops.cast(mask, "bool")


def _wide_array(variable):
    """A variable as an array of a dtype that NumPy files support."""
    narrow = keras.backend.is_float_dtype(variable.dtype)
    narrow = narrow and variable.dtype != "float64"
    return ops.convert_to_numpy(ops.cast(variable, "float32") if narrow else variable)


def squared_error(old, new, mask):
    """`Σ‖new − old‖² / Σ‖old‖²` over positions that are not padding, a scalar.

    Args:
        old: `(..., dim)`, or a tuple whose first element is such a tensor; without
            gradient.
        new: The same.
        mask: From `position_mask`, read for `(batch, length, dim)` of its length.
    """
    old, new = (
        ops.cast(x[0] if isinstance(x, tuple) else x, "float32") for x in (old, new)
    )
    old = ops.stop_gradient(old)
    difference = ops.sum(ops.square(new - old), axis=-1)
    norm = ops.sum(ops.square(old), axis=-1)
    kept = _position_weights(mask, norm)
    return ops.sum(difference * kept) / (ops.sum(norm * kept) + 1e-7)


def divergence(old, new, mask):
    """The mean of `KL(softmax(old) ‖ softmax(new))` in nats, a scalar.

    Args:
        old: Logits `(..., classes)`, without gradient.
        new: The same.
        mask: As for `squared_error`.
    """
    old, new = (ops.log_softmax(ops.cast(x, "float32")) for x in (old, new))
    old = ops.stop_gradient(old)
    found = ops.sum(ops.exp(old) * (old - new), axis=-1)
    kept = _position_weights(mask, found)
    return ops.sum(found * kept) / ops.sum(kept)


def _position_weights(mask, values):
    """1 for values at positions that are not padding, and 0 for others."""
    shape = values.shape
    if mask is None or len(shape) != 2 or shape[1] != mask.shape[1]:
        return ops.ones_like(values)
    return ops.cast(mask, values.dtype) * ops.ones_like(values)
